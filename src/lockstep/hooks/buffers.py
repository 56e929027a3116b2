"""One set of running statistics for all ranks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.dist import all_reduce_params, broadcast
from lockstep.model import ModelWrapper
from lockstep.registry import HOOKS
from lockstep.runner.hook import Hook
from lockstep.runner.run import Run, TrainRun


@HOOKS.register_module()
class SyncBuffersHook(Hook):
    """Average the model's buffers over ranks before each validation, test and checkpoint.

    During an epoch, the running statistics of BatchNorm follow each rank's own samples; what is validated and saved
    must be one model. Buffers of whole numbers are those of rank 0. The stages of a pipeline have unlike buffers, which
    stay as they are.

    **Cost**: one all_reduce and one broadcast for each dtype.
    """

    def before_val_epoch(self, runner: Run) -> None:
        """Average before validating."""
        _average_alike(runner.model)

    def before_test_epoch(self, runner: Run) -> None:
        """Average before testing."""
        _average_alike(runner.model)

    def before_save_checkpoint(self, runner: TrainRun, checkpoint: dict[str, Any]) -> None:
        """Average before saving; the checkpoint holds the very tensors."""
        _average_alike(runner.model)


@torch.no_grad()
def average_buffers(buffers: Iterable[Tensor]) -> None:
    """Make buffers the same on all ranks, in place: means, and rank 0's where they are whole numbers.

    **Collective**: every rank, with the same shapes and dtypes.

    **Example (2 ranks)**::

        >>> from lockstep.dist import get_rank
        >>> mean, count = torch.tensor([1.0 + get_rank()]), torch.tensor(5 + get_rank())
        >>> average_buffers([mean, count])
        >>> mean, count
        (tensor([1.5000]), tensor(5))
    """
    floating: list[Tensor] = []
    whole: dict[torch.dtype, list[Tensor]] = {}
    for buffer in buffers:
        if buffer.is_floating_point() or buffer.is_complex():
            floating.append(buffer)
        else:
            whole.setdefault(buffer.dtype, []).append(buffer)
    if floating:
        all_reduce_params(floating, op="mean")
    for members in whole.values():
        flat = torch.cat([buffer.flatten() for buffer in members])
        broadcast(flat)
        parts = torch.split_with_sizes(flat, [buffer.numel() for buffer in members])
        for buffer, part in zip(members, parts, strict=True):
            buffer.copy_(part.view_as(buffer))


def _average_alike(model: nn.Module) -> None:
    if not (isinstance(model, ModelWrapper) and model.is_stage):
        average_buffers(model.buffers())
