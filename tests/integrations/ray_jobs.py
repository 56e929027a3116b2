"""Two trainings under Ray Train on this machine, the first of which loses a worker, and the same without Ray.

`python ray_jobs.py FOLDER` writes there each rank's losses by iteration, and what Ray knows of each training.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import ray
from on_ray import fit
from small import by_hand, by_runner

from lockstep.hooks import Hook
from lockstep.launch import JobSpec, launch


class Losses(Hook):
    """Writes the loss of each iteration to a file of this rank."""

    def __init__(self, file: str) -> None:
        self._file = file

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        with open(f"{self._file}.{runner.rank}", "a") as file:
            file.write(json.dumps([runner.iter, float(outputs["loss"])]) + "\n")


class KilledOnce(Hook):
    """Kills rank 1 in the second epoch, when Ray knows of the first one's checkpoint, unless that has been done."""

    def __init__(self, mark: str, storage: Path) -> None:
        self._mark, self._storage = mark, storage

    def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        if runner.rank == 1 and runner.iter == 6 and not os.path.exists(self._mark):
            while not list(self._storage.glob("*/checkpoint_manager_snapshot.json")):
                time.sleep(0.1)
            Path(self._mark).touch()
            os.kill(os.getpid(), signal.SIGKILL)


def main(folder: Path) -> None:
    trainings = {"runner": by_runner, "hand": by_hand}
    for name, train in trainings.items():
        losses = Losses(str(folder / f"{name}-alone"))
        launch(partial(train, str(folder / "alone" / name), (losses,)), JobSpec(2))
    ray.init(num_cpus=2, include_dashboard=False)
    for name, train in trainings.items():
        hooks = (Losses(str(folder / f"{name}-ray")), KilledOnce(str(folder / "killed"), folder / "storage"))
        result = fit(train, str(folder / "work_dirs" / name), str(folder / "storage"), 2, hooks)
        saved = result.checkpoint.path
        (folder / f"{name}.json").write_text(json.dumps({"metrics": result.metrics, "checkpoint": saved}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
