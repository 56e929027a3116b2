"""Synchronisation of the model's buffers: one set of running statistics for all ranks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from lockstep.dist import all_reduce_params, broadcast_tree
from lockstep.model.shards import own_shard
from lockstep.registry import HOOKS
from lockstep.runner.hook import Hook
from lockstep.runner.run import Run, TrainRun


@HOOKS.register_module()
class SyncBuffersHook(Hook):
    """Average the model's buffers over ranks before each validation, test and checkpoint.

    During an epoch, the running statistics of BatchNorm depend on each rank's own samples, but all ranks must validate
    and save the same model. Integer buffers are copied from rank 0.

    **Cost**: one all_reduce for each dtype, and one broadcast_tree.
    """

    def before_val_epoch(self, runner: Run) -> None:
        """Average before validating."""
        average_buffers(runner.model.buffers())

    before_test_epoch = before_val_epoch

    def before_save_checkpoint(self, runner: TrainRun, checkpoint: dict[str, Any]) -> None:
        """Average before saving; the checkpoint refers to these tensors."""
        self.before_val_epoch(runner)


@torch.no_grad()
def average_buffers(buffers: Iterable[Tensor]) -> None:
    """Make buffers the same on all ranks, in place: the mean over ranks, or rank 0's value for integer buffers.

    **Collective**: every rank, with the same shapes and dtypes.

    **Example (2 ranks)**::

        >>> from lockstep.dist import get_rank
        >>> mean, count = torch.tensor([1.0 + get_rank()]), torch.tensor(5 + get_rank())
        >>> average_buffers([mean, count])
        >>> mean, count
        (tensor([1.5000]), tensor(5))
    """
    floating: list[Tensor] = []
    whole: list[Tensor] = []
    for buffer in map(own_shard, buffers):  # tensor parallelism makes DTensors of some, which each rank has whole
        (floating if buffer.is_floating_point() or buffer.is_complex() else whole).append(buffer)
    if floating:
        all_reduce_params(floating, op="mean")
    if whole:
        for buffer, value in zip(whole, broadcast_tree(whole), strict=True):
            buffer.copy_(value)
