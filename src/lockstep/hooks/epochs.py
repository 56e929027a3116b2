"""Hooks of a few lines that act where an epoch begins or ends: on the order of the samples, and on cached memory."""

from __future__ import annotations

from typing import Any

import torch

from lockstep.dataset import set_epoch
from lockstep.registry import HOOKS
from lockstep.runner.hook import Hook
from lockstep.runner.run import Run, TrainRun


@HOOKS.register_module()
class DistSamplerSeedHook(Hook):
    """Tell the training data which epoch begins, so that each has an order of its own; the name is MMEngine's."""

    def before_train_epoch(self, runner: TrainRun) -> None:
        """Call `set_epoch` of the sampler and of the datasets, where they have it, and seed the workers anew."""
        set_epoch(runner.train_dataloader, runner.epoch)


@HOOKS.register_module()
class EmptyCacheHook(Hook):
    """Let torch's allocator release the accelerator memory that it caches for later use.

    It helps if other processes need the memory, or if the memory is fragmented; memory in use is not affected. Without
    an accelerator, the hook does nothing.

    Args:
        before_epoch: release memory before each pass through training, validation or test data.
        after_epoch: release it after each pass.
        after_iter: release it after each batch; the next batch must then allocate all its memory again.
    """

    def __init__(self, before_epoch: bool = False, after_epoch: bool = True, after_iter: bool = False) -> None:
        self._empties_before_epoch = before_epoch
        self._empties_after_epoch = after_epoch
        self._empties_after_iter = after_iter

    def _before_epoch(self, runner: Run, mode: str = "train") -> None:
        """Release memory before an epoch, a validation or a test, if enabled."""
        _empty_cache(self._empties_before_epoch)

    def _after_epoch(self, runner: Run, mode: str = "train") -> None:
        """Release memory after an epoch, a validation or a test, if enabled."""
        _empty_cache(self._empties_after_epoch)

    def _after_iter(
        self, runner: Run, batch_idx: int, data_batch: Any = None, outputs: Any = None, mode: str = "train"
    ) -> None:
        """Release memory after a batch, if enabled."""
        _empty_cache(self._empties_after_iter)


def _empty_cache(asked_for: bool) -> None:
    if asked_for and torch.accelerator.is_available():
        torch.accelerator.empty_cache()
