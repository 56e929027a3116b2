"""Ends a run of the GPU tests on a machine without a GPU by one sentence, instead of one failure for each."""

from __future__ import annotations

import pytest

from lockstep.device import get_device

NO_DEVICE = (
    "these tests must run where torch finds an accelerator, but it finds none here; make test runs them on the CPU"
)


def pytest_collection_finish(session: pytest.Session) -> None:
    is_run = not session.config.option.collectonly
    if is_run and get_device() == "cpu" and any(item.get_closest_marker("gpu") for item in session.items):
        pytest.exit(NO_DEVICE, returncode=1)
