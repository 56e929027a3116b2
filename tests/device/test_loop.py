"""Trainings on the simulated accelerator: how often the host waits for the device in a step."""

from __future__ import annotations

import json
from typing import Any

import pytest

from .loop import CASES, RECORD, STEPS
from .test_device import HERE, compiled, run

__all__ = ["compiled"]


@pytest.fixture(scope="module")
def waits(tmp_path_factory: pytest.TempPathFactory, compiled: None) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("loop")
    run("-m", "lockstep", "launch", HERE / "loop.py", "--nproc", 2, "--log-dir", folder, "--", folder)
    return [json.loads((folder / f"rank_{rank}.json").read_text()) for rank in range(2)]


# After the first steps, in which ranks compare what they do.
BEGIN = 8


@pytest.mark.parametrize("name", [*CASES, "session"])
def test_a_step_lets_the_host_wait_for_nothing(waits: list[dict[str, Any]], name: str) -> None:
    steps = range(BEGIN + 1, STEPS + 1)
    plain = [[rank[name][step - 2] for step in steps if step % RECORD] for rank in waits]
    assert plain == [[0] * len(plain[0])] * 2
    records = [[rank[name][step - 2] for step in steps if step % RECORD == 0] for rank in waits]
    assert all(0 < count <= 2 for rank in records for count in rank)  # of logger and NaN check
