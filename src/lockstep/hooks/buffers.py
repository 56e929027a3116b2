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

_WITHOUT_FLOAT64 = ("mps", "npu")  # in torch or in its collectives


@HOOKS.register_module()
class SyncBuffersHook(Hook):
    """Average the model's buffers over ranks before each validation, test and checkpoint.

    During an epoch, the running statistics of BatchNorm depend on each rank's own samples, but all ranks must validate
    and save the same model. All floating buffers are averaged, and the others are copied from rank 0. Buffers that are
    equal on all ranks, such as a table of frequencies, stay as they are, bit for bit; on devices without float64 they
    may be rounded.

    **Cost**: one all_reduce of float64, for complex buffers another one, and one broadcast_tree.
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
        # The mean of equal numbers must be that number. In their own dtype, a sum over 3 ranks is rounded, or infinite.
        wide = [buffer.to(_wider(buffer)) for buffer in floating]
        all_reduce_params(wide, op="mean")
        for buffer, mean in zip(floating, wide, strict=True):
            buffer.copy_(mean)
    if whole:
        for buffer, value in zip(whole, broadcast_tree(whole), strict=True):
            buffer.copy_(value)


def _wider(buffer: Tensor) -> torch.dtype:
    if buffer.is_complex():
        return torch.complex128
    return torch.float32 if buffer.device.type in _WITHOUT_FLOAT64 else torch.float64
