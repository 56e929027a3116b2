"""One set of running statistics for all ranks."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lockstep.dist import all_reduce_params, broadcast
from lockstep.hooks.hook import Hook
from lockstep.hooks.host import RunnerLike
from lockstep.registry import HOOKS


@HOOKS.register_module()
class SyncBuffersHook(Hook):
    """Average the model's buffers over ranks before each validation and each checkpoint.

    During an epoch, the running statistics of BatchNorm follow each rank's own samples; what is
    validated and saved must be one model. Buffers of whole numbers are those of rank 0.
    """

    def before_val_epoch(self, runner: RunnerLike) -> None:
        """Average before validating."""
        _average_buffers(runner)

    def before_save_checkpoint(self, runner: RunnerLike, checkpoint: dict[str, Any]) -> None:
        """Average before saving; the checkpoint holds the very tensors."""
        _average_buffers(runner)


def _average_buffers(runner: RunnerLike) -> None:
    if runner.world_size == 1:
        return
    floating: list[Tensor] = []
    for buffer in runner.model.buffers():
        if buffer.is_floating_point():
            floating.append(buffer)
        else:
            broadcast(buffer)
    if floating:
        all_reduce_params(floating, op="mean")
