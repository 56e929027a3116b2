"""A hook that runs Python's garbage collection at the same moment on all ranks."""

from __future__ import annotations

import gc
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from lockstep.errors import require_count, require_one_of
from lockstep.registry import HOOKS
from lockstep.runner.hook import Hook
from lockstep.runner.run import TrainRun


@HOOKS.register_module()
@dataclass(eq=False, repr=False)
class GarbageCollectionHook(Hook):
    """Collect garbage every few iterations, on all ranks at once, and at no other time during an epoch.

    By default, Python collects on each rank at a different moment, and all other ranks wait: with many ranks, almost
    every step is delayed. Before training, all existing objects are also excluded from collection (`gc.freeze`), so
    that later collections need not traverse models and libraries again.

    Args:
        interval: number of iterations from one collection to the next. Between them, objects in reference cycles stay
            in memory.
        generation: the generation to collect: 0 for the youngest objects only, 2 for all. With 1, cycles that outlive
            two collections go at the end of the epoch, where all are collected: give 2 where an epoch is long.
    """

    priority = "VERY_LOW"

    interval: int = 100
    generation: int = 1

    def __post_init__(self) -> None:
        require_count("interval", self.interval)
        require_one_of("generation", self.generation, (0, 1, 2))
        self._restore = ExitStack()

    def before_train(self, runner: TrainRun) -> None:
        """Collect once, freeze what is left unless somebody has frozen objects, and disable automatic collection."""
        if gc.isenabled():
            self._restore.callback(gc.enable)
        gc.disable()
        gc.collect()
        if gc.get_freeze_count() == 0:  # else what is frozen now would stay so: `unfreeze` would thaw the others', too
            gc.freeze()
            self._restore.callback(gc.unfreeze)

    def after_train_iter(self, runner: TrainRun, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        """Collect every few iterations."""
        if self.every_n_train_iters(runner, self.interval):
            gc.collect(self.generation)

    def after_train_epoch(self, runner: TrainRun) -> None:
        """Collect everything: an epoch leaves behind its data loader's workers and queues."""
        gc.collect()

    def close(self) -> None:
        """Restore the collector's former settings, even if training has failed."""
        self._restore.close()
