"""Unused accelerator memory, given back."""

from __future__ import annotations

from typing import Any

import torch

from lockstep.hooks.hook import Hook
from lockstep.hooks.host import RunnerLike
from lockstep.registry import HOOKS


@HOOKS.register_module()
class EmptyCacheHook(Hook):
    """Let torch's allocator give back the accelerator memory that it keeps for later use.

    It helps where other processes need the memory, or where it is in pieces; what is used is not touched. Without an
    accelerator nothing happens.

    Args:
        before_epoch: before each pass through training, validation or test data.
        after_epoch: after each.
        after_iter: after each batch, which makes the next one ask for all of its memory anew.
    """

    def __init__(self, before_epoch: bool = False, after_epoch: bool = True, after_iter: bool = False) -> None:
        self._empties_before_epoch = before_epoch
        self._empties_after_epoch = after_epoch
        self._empties_after_iter = after_iter

    def before_train_epoch(self, runner: RunnerLike) -> None:
        """Give memory back before an epoch, if asked for."""
        _empty_cache(self._empties_before_epoch)

    def before_val_epoch(self, runner: RunnerLike) -> None:
        """Give memory back before a validation, if asked for."""
        _empty_cache(self._empties_before_epoch)

    def before_test_epoch(self, runner: RunnerLike) -> None:
        """Give memory back before a test, if asked for."""
        _empty_cache(self._empties_before_epoch)

    def after_train_epoch(self, runner: RunnerLike) -> None:
        """Give memory back after an epoch, if asked for."""
        _empty_cache(self._empties_after_epoch)

    def after_val_epoch(self, runner: RunnerLike, metrics: dict[str, Any] | None = None) -> None:
        """Give memory back after a validation, if asked for."""
        _empty_cache(self._empties_after_epoch)

    def after_test_epoch(self, runner: RunnerLike, metrics: dict[str, Any] | None = None) -> None:
        """Give memory back after a test, if asked for."""
        _empty_cache(self._empties_after_epoch)

    def after_train_iter(
        self,
        runner: RunnerLike,
        batch_idx: int,
        data_batch: Any = None,
        outputs: dict[str, Any] | None = None,
    ) -> None:
        """Give memory back after a training batch, if asked for."""
        _empty_cache(self._empties_after_iter)

    def after_val_iter(self, runner: RunnerLike, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        """Give memory back after a validation batch, if asked for."""
        _empty_cache(self._empties_after_iter)

    def after_test_iter(self, runner: RunnerLike, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        """Give memory back after a test batch, if asked for."""
        _empty_cache(self._empties_after_iter)


def _empty_cache(asked_for: bool) -> None:
    if asked_for and torch.accelerator.is_available():
        torch.accelerator.empty_cache()
