"""Python's garbage collection at the same moment on all ranks."""

from __future__ import annotations

import gc
from contextlib import ExitStack
from typing import Any

from lockstep.registry import HOOKS
from lockstep.runner.hook import Hook
from lockstep.runner.run import TrainRun


@HOOKS.register_module()
class GarbageCollectionHook(Hook):
    """Collect garbage every few iterations, on all ranks at once, and at no other time while training goes on.

    Left to itself, Python collects on each rank at a moment of its own, while all other ranks wait for that one: with
    many ranks there is hardly a step without. Before training, everything that exists is also set aside for good
    (`gc.freeze`), so that later collections need not walk through models and libraries again.

    Args:
        interval: number of iterations from one collection to the next. Between them, objects that refer to each
            other in a circle stay in memory.
        generation: which objects are looked at: 0 the youngest, 2 all.
    """

    priority = "VERY_LOW"

    def __init__(self, interval: int = 100, generation: int = 1) -> None:
        if interval < 1:
            raise ValueError(f"`interval` must be at least 1, but is {interval}")
        if generation not in (0, 1, 2):
            raise ValueError(f"`generation` must be 0, 1 or 2, but is {generation!r}")
        self.interval = interval
        self.generation = generation
        self._leaving = ExitStack()

    def before_train(self, runner: TrainRun) -> None:
        """Collect once, set aside what is left, and stop automatic collection."""
        if gc.isenabled():
            self._leaving.callback(gc.enable)
        if gc.get_freeze_count() == 0:
            self._leaving.callback(gc.unfreeze)
        gc.collect()
        gc.freeze()
        gc.disable()

    def after_train_iter(self, runner: TrainRun, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        """Collect every few iterations."""
        if (runner.iter + 1) % self.interval == 0:
            gc.collect(self.generation)

    def after_train_epoch(self, runner: TrainRun) -> None:
        """Collect everything: an epoch leaves its data loader's workers and queues behind."""
        gc.collect()

    def after_train(self, runner: TrainRun) -> None:
        """Leave the collector as it was found."""
        self.close()

    def close(self) -> None:
        """Leave the collector as it was found, also if training has failed."""
        self._leaving.close()
