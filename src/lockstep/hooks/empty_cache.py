"""Unused accelerator memory, given back."""

from __future__ import annotations

from typing import Any

import torch

from lockstep.registry import HOOKS
from lockstep.runner.hook import Hook
from lockstep.runner.run import Run


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

    def _before_epoch(self, runner: Run, mode: str = "train") -> None:
        """Give memory back before an epoch, a validation or a test, if asked for."""
        _empty_cache(self._empties_before_epoch)

    def _after_epoch(self, runner: Run, mode: str = "train") -> None:
        """Give memory back after an epoch, a validation or a test, if asked for."""
        _empty_cache(self._empties_after_epoch)

    def _after_iter(
        self, runner: Run, batch_idx: int, data_batch: Any = None, outputs: Any = None, mode: str = "train"
    ) -> None:
        """Give memory back after a batch, if asked for."""
        _empty_cache(self._empties_after_iter)


def _empty_cache(asked_for: bool) -> None:
    if asked_for and torch.accelerator.is_available():
        torch.accelerator.empty_cache()
