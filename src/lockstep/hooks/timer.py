"""How long iterations take."""

from __future__ import annotations

from collections.abc import Mapping, Sized
from time import perf_counter
from typing import Any

from torch import Tensor

from lockstep.hooks.hook import Hook
from lockstep.hooks.host import RunnerLike
from lockstep.registry import HOOKS


@HOOKS.register_module()
class IterTimerHook(Hook):
    """Record, for every training iteration, its seconds, those spent waiting for data, its samples.

    They are the scalars `train/time`, `train/data_time` and `train/samples` of the message hub. An
    accelerator is not waited for: single iterations may be off, the mean over many is not.
    """

    def __init__(self) -> None:
        self._last = 0.0

    def before_train_epoch(self, runner: RunnerLike) -> None:
        """Start the clock."""
        self._last = perf_counter()

    def before_train_iter(self, runner: RunnerLike, batch_idx: int, data_batch: Any = None) -> None:
        """Note how long the batch took to arrive."""
        runner.message_hub.update_scalar("train/data_time", perf_counter() - self._last)

    def after_train_iter(
        self,
        runner: RunnerLike,
        batch_idx: int,
        data_batch: Any = None,
        outputs: dict[str, Any] | None = None,
    ) -> None:
        """Note how long the iteration took, waiting included."""
        now = perf_counter()
        hub = runner.message_hub
        hub.update_scalar("train/time", now - self._last)
        hub.update_scalar("train/samples", samples_in(data_batch))
        self._last = now

    def after_val_epoch(self, runner: RunnerLike, metrics: dict[str, Any] | None = None) -> None:
        """Start the clock again; a loop by iterations validates between two of them."""
        self._last = perf_counter()


def samples_in(batch: Any) -> int:
    """Return the number of samples in a batch, as its first part shows it."""
    if isinstance(batch, Mapping):
        batch = next(iter(batch.values()), None)
    elif isinstance(batch, list | tuple):
        batch = batch[0] if batch else None
    if isinstance(batch, Tensor):
        return batch.shape[0] if batch.dim() else 1
    return len(batch) if isinstance(batch, Sized) and not isinstance(batch, str) else 1
