"""Ray Train starts ranks, keeps lockstep's checkpoints, and goes on from them when a worker has been killed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from lockstep.checkpoint import read_meta

from .conftest import Start

JOBS = Path(__file__).with_name("ray_jobs.py")


def test_a_training_whose_worker_is_killed_goes_on_exactly(tmp_path: Path, start: Start) -> None:
    # The variable keeps Ray, and so the ranks, on loopback. Warnings of Ray about its former version would be errors.
    start(
        sys.executable, str(JOBS), str(tmp_path), RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0",
        RAY_TRAIN_ENABLE_V2_MIGRATION_WARNINGS="0", RAY_USAGE_STATS_ENABLED="0",
    )  # fmt: skip
    for name, iterations in (("runner", [*range(6), *range(4, 12)]), ("hand", [*range(12)])):
        for rank in range(2):
            alone, under_ray = (losses(tmp_path / f"{name}-{way}.{rank}") for way in ("alone", "ray"))
            assert [iteration for iteration, _ in under_ray] == iterations
            assert under_ray == [alone[iteration] for iteration in iterations]
        result = json.loads((tmp_path / f"{name}.json").read_text())
        last = [loss for _, loss in losses(tmp_path / f"{name}-alone.0")[-4:]]
        assert result["metrics"] == {"epoch": 3, "loss": pytest.approx(sum(last) / 4)}
        assert Path(result["checkpoint"]).is_relative_to(tmp_path / "storage")
        assert read_meta(Path(result["checkpoint"]))["epoch"] == 3


def losses(file: Path) -> list[list[float]]:
    return [json.loads(line) for line in file.read_text().splitlines()]
