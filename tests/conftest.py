"""What holds for the whole suite."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator

import pytest
from hypothesis import settings

pytest_plugins = ["pytester"]

# The first example of a property may start a pool of ranks, which no deadline per example should have to allow for.
settings.register_profile("lockstep", deadline=None)
settings.load_profile("lockstep")

# pytest itself rewrites this one between the phases of a test.
_CHANGED_BY_PYTEST = "PYTEST_CURRENT_TEST"


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Fail a test that leaves environment variables changed or threads running (ranks check themselves)."""
    variables, threads = _variables(), set(threading.enumerate())
    yield
    assert _variables() == variables
    deadline = time.monotonic() + 1
    while (left := set(threading.enumerate()) - threads) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not left


def _variables() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != _CHANGED_BY_PYTEST}
