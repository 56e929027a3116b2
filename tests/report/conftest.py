from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

MakeRun = Callable[..., Path]


def train_record(iteration: int, **more: Any) -> dict[str, Any]:
    means = {"time": 0.02, "data_time": 0.002, "comm_time": 0.005, "loss": 30 / iteration, "lr": 1e-3}
    return {"mode": "train", "epoch": 1 + iteration // 50, "iter": iteration, **means, **more}


def val_record(iteration: int, **metrics: Any) -> dict[str, Any]:
    return {"mode": "val", "epoch": iteration // 50, "iter": iteration, **metrics}


def rank_row(iteration: int, ranks: int = 2, **more: Any) -> dict[str, Any]:
    columns = {name: [seconds] * ranks for name, seconds in (("time", 0.02), ("data_time", 0.002), ("comm_time", 0.005))}
    return {"iter": iteration, "count": 10, **columns, **more}


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    """Return a function that writes the folder of a run: ten training records and two validations, or what is given."""

    def make_run(
        records: Iterable[dict[str, Any]] | None = None,
        ranks: Iterable[dict[str, Any]] = (),
        environment: dict[str, Any] | None = None,
        config: str = "",
        name: str = "20261121_120000",
    ) -> Path:
        folder = tmp_path / "digits" / name
        folder.mkdir(parents=True)
        if records is None:
            records = [train_record(step, samples_per_second=5000.0, memory_mib=400.0) for step in range(10, 101, 10)]
            records += [val_record(50, accuracy=91.25), val_record(100, accuracy=97.5)]
        write_lines(folder / "metrics.jsonl", records)
        if ranks:
            write_lines(folder / "ranks.jsonl", ranks)
        if environment is not None:
            (folder / "environment.json").write_text(json.dumps(environment))
        if config:
            (folder / "config.py").write_text(config)
        return folder

    return make_run


def write_lines(path: Path, records: Iterable[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
