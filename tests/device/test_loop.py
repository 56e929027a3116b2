"""Trainings on the simulated accelerator: how often the host waits for the device in a step, and what is computed."""

from __future__ import annotations

import json
from typing import Any

import pytest

from .conftest import HERE, Start
from .loop import CASES, RECORD, STEPS


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, start: Start) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("loop")
    with start("-m", "lockstep", "launch", HERE / "loop.py", "--nproc", 2, "--log-dir", folder, "--", folder) as job:
        _, errors = job.communicate(timeout=600)
    assert job.returncode == 0, errors
    return [json.loads((folder / f"rank_{rank}.json").read_text()) for rank in range(2)]


# What each step must wait for.
WAITS = {"an average on the CPU": 1, "float16": 1}  # torch's own scaler asks whether to skip the update

# After the first steps, in which ranks compare what they do.
BEGIN = 8


@pytest.mark.parametrize("name", [*CASES, "session"])
def test_a_step_lets_the_host_wait_for_nothing(found: list[dict[str, Any]], name: str) -> None:
    steps = range(BEGIN + 1, STEPS + 1)
    waits = [[rank[name]["waits"][step - 2] - WAITS.get(name, 0) for step in steps] for rank in found]
    # In the step after a record, and after a NaN check, the values of the step before may still be on their way.
    most = [2 if step % RECORD == 1 else 0 for step in steps]
    assert all(0 <= count <= least for rank in waits for count, least in zip(rank, most, strict=True))


@pytest.mark.parametrize("name", ["a stream", "batch_size_of", "an average", "an average on the CPU"])
def test_losses_are_those_of_a_plain_training(found: list[dict[str, Any]], name: str) -> None:
    assert [rank[name]["losses"] for rank in found] == [rank["workers"]["losses"] for rank in found]


def test_records_lack_the_memory_that_the_device_does_not_count(found: list[dict[str, Any]]) -> None:
    names = found[0]["ddp"]["names"]
    assert {"loss", "time", "grad_norm", "lr"} <= set(names)
    assert "memory_mib" not in names
