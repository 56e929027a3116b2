"""Records as a run would leave them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def train_record(iteration: int, **more: Any) -> dict[str, Any]:
    means = {"time": 0.02, "data_time": 0.002, "comm_time": 0.005, "loss": 30 / iteration, "lr": 1e-3}
    return {"mode": "train", "epoch": 1 + (iteration - 1) // 50, "iter": iteration, **means, **more}


def val_record(iteration: int, **metrics: Any) -> dict[str, Any]:
    return {"mode": "val", "epoch": iteration // 50, "iter": iteration, **metrics}


def write_lines(path: Path, records: Iterable[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def write_run(
    folder: Path,
    records: Iterable[dict[str, Any]] | None = None,
    environment: dict[str, Any] | None = None,
    config: str = "",
) -> Path:
    """Write the folder of a run: ten training records and two validations, or the records that are given."""
    folder.mkdir(parents=True)
    if records is None:
        records = [train_record(step, samples_per_second=5000.0, memory_mib=400.0) for step in range(10, 101, 10)]
        records += [val_record(50, accuracy=91.25), val_record(100, accuracy=97.5)]
    write_lines(folder / "metrics.jsonl", records)
    if environment is not None:
        (folder / "environment.json").write_text(json.dumps(environment))
    if config:
        (folder / "config.py").write_text(config)
    return folder


def write_whole_run(folder: Path) -> Path:
    """Write a run on two ranks of which everything is known."""
    host = {"host": "node1", "device": "cpu", "device_name": "A fast one", "threads": 1}
    environment = {
        "started": "2026-11-21T12:00:00+00:00",
        "command": "lockstep train config.py",
        "model": "DigitsNet, 18,490 parameters, DDPStrategy",
        "seed": 3,
        "world_size": 2,
        "backend": "gloo",
        "torch": "2.13.0",
        "units": {"accuracy": "%"},
        "ranks": [host, host],
    }
    return write_run(folder, environment=environment, config="work_dir = 'runs'  # here\nlr = 1e-3\n")
