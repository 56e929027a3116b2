"""A hook that measures the time of iterations."""

from __future__ import annotations

from time import perf_counter
from typing import Any

from lockstep.registry import HOOKS
from lockstep.runner.hook import Hook
from lockstep.runner.run import Run, TrainRun


@HOOKS.register_module()
class IterTimerHook(Hook):
    """Record the duration of every training iteration, the time spent waiting for data, and the samples.

    They are the scalars `train/time` (s), `train/data_time` (s) and `train/samples` of the message hub. An accelerator
    is not synchronised: the time of a single iteration may be wrong, but the mean over many is right.
    """

    def __init__(self) -> None:
        self._last = 0.0

    def before_train_epoch(self, runner: TrainRun) -> None:
        """Start the clock."""
        self._last = perf_counter()

    def before_train_iter(self, runner: TrainRun, batch_idx: int, data_batch: Any = None) -> None:
        """Record how long the batch took to arrive."""
        runner.message_hub.update_scalar("train/data_time", perf_counter() - self._last)

    def after_train_iter(
        self, runner: TrainRun, batch_idx: int, data_batch: Any = None, outputs: dict[str, Any] | None = None
    ) -> None:
        """Record how long the iteration took, including the wait for data."""
        now = perf_counter()
        hub = runner.message_hub
        hub.update_scalar("train/time", now - self._last)
        hub.update_scalar("train/samples", runner.train_loop.samples)
        self._last = now

    def after_val_epoch(self, runner: Run, metrics: dict[str, Any] | None = None) -> None:
        """Restart the clock; an iteration-based loop validates between two iterations."""
        self._last = perf_counter()
