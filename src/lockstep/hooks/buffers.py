"""Synchronisation of the model's buffers: one set of running statistics for all ranks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.dist import all_reduce_params, broadcast_tree
from lockstep.dist.agreement import differing
from lockstep.errors import listed
from lockstep.model import unwrap_model
from lockstep.model.norm import BATCH_NORMS, INSTANCE_NORMS
from lockstep.model.shards import digests, own_shard
from lockstep.registry import HOOKS
from lockstep.runner.hook import Hook
from lockstep.runner.run import Run, TrainRun

_ITERATIONS = 3  # after which buffers are compared
_WITHOUT_FLOAT64 = ("mps", "npu")  # in torch or in its collectives


@HOOKS.register_module()
class SyncBuffersHook(Hook):
    """Average the model's buffers over ranks before each validation, test and checkpoint.

    During an epoch, the running statistics of BatchNorm depend on each rank's own samples, but all ranks must validate
    and save the same model. Floating buffers are averaged; sparse ones, and those of integers, are copied from rank 0.
    Buffers that are equal on all ranks, such as a table of frequencies, stay as they are, bit for bit. But those of
    float64 and complex128, and on devices without float64 all, may be rounded, or infinite where their sum over ranks
    is. A buffer that has another shape on another rank, such as a table that the model extends for longer inputs, stays
    as it is on each.

    After three iterations, floating buffers are compared, except those of normalisations. Where they differ, their mean
    may not be what the model needs, and a warning names them.

    **Cost**: one exchange between the hosts, one all_reduce_params of the floating buffers in float64, and one
    broadcast_tree. Memory for copies of all floating buffers in float64 at once, and for a second one of each copy
    below 1 MiB. The comparison, once in a training: one reading of the buffers, one host read, and one exchange.
    """

    _iterations = 0

    def before_train(self, runner: TrainRun) -> None:
        """Begin to count iterations."""
        self._iterations = 0

    def after_train_iter(self, runner: TrainRun, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        """Compare what each rank may have updated with its own samples."""
        self._iterations += 1
        if self._iterations == _ITERATIONS and runner.distributed:
            _warn_of_own_updates(runner)

    def before_val_epoch(self, runner: Run) -> None:
        """Average before validating."""
        average_buffers(alike_on_all(unwrap_model(runner.model)).values())

    before_test_epoch = before_val_epoch

    def before_save_checkpoint(self, runner: TrainRun, checkpoint: dict[str, Any]) -> None:
        """Average before saving; the checkpoint refers to these tensors."""
        self.before_val_epoch(runner)


def alike_on_all(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that have one shape and dtype on all ranks, by name. **Collective**: every rank."""
    buffers = dict(model.named_buffers())
    by_rank = differing({name: (buffer.shape, buffer.dtype) for name, buffer in buffers.items()})
    if by_rank is None:
        return buffers
    return {name: buffers[name] for name, form in by_rank[0].items() if all(one.get(name) == form for one in by_rank)}


def _warn_of_own_updates(run: TrainRun) -> None:
    """Warn of buffers that are not the same on all ranks. **Collective**: every rank."""
    norms = [part for part in run.model.modules() if isinstance(part, BATCH_NORMS + INSTANCE_NORMS)]
    of_norms = {id(buffer) for norm in norms for buffer in norm.buffers(recurse=False)}
    compared = {
        name: buffer
        for name, buffer in alike_on_all(unwrap_model(run.model)).items()
        if buffer.is_floating_point() and buffer.layout is torch.strided and id(buffer) not in of_norms
    }
    by_rank = differing(digests(list(compared.values())).tolist() if compared else [])
    if by_rank is None:
        return
    columns = zip(compared, zip(*by_rank, strict=True), strict=True)
    run.logger.warning(
        "these buffers are not the same on all ranks, each of which updates them with its own samples: %s. They are "
        "averaged before each validation and checkpoint, which may not be what the model needs. Let their layer use "
        "the samples of all ranks: many do if the process group exists when they are built, so call "
        "lockstep.dist.init_dist() before; or give `ddp` broadcast_buffers=True, which takes those of rank 0",
        listed(name for name, column in columns if len(set(column)) > 1),
    )  # fmt: skip


@torch.no_grad()
def average_buffers(buffers: Iterable[Tensor]) -> None:
    """Make buffers the same on all ranks, in place: the mean over ranks, or rank 0's value if integer or sparse.

    **Collective**: every rank, with the same shapes and dtypes.

    **Example (2 ranks)**::

        >>> from lockstep.dist import get_rank
        >>> mean, count = torch.tensor([1.0 + get_rank()]), torch.tensor(5 + get_rank())
        >>> average_buffers([mean, count])
        >>> mean, count
        (tensor([1.5000]), tensor(5))
    """
    floating: list[Tensor] = []
    copied: list[Tensor] = []  # integer or sparse
    for buffer in map(own_shard, buffers):  # tensor parallelism makes DTensors of some, which each rank has whole
        is_dense = buffer.layout is torch.strided
        if is_dense:  # each element of an expanded one once: torch does not write to elements that share memory
            buffer = buffer[tuple(slice(None if stride else 1) for stride in buffer.stride())]
        has_mean = is_dense and (buffer.is_floating_point() or buffer.is_complex())
        (floating if has_mean else copied).append(buffer)
    if floating:
        # The mean of equal numbers should be that number. In their own dtype, their sum is rounded, or infinite.
        wide = [buffer.to(_wider(buffer)) for buffer in floating]
        all_reduce_params(wide, op="mean")
        for buffer, mean in zip(floating, wide, strict=True):
            buffer.copy_(mean)
    if copied:
        for buffer, value in zip(copied, broadcast_tree(copied), strict=True):
            buffer.copy_(value)


def _wider(buffer: Tensor) -> torch.dtype:
    real = torch.float32 if buffer.device.type in _WITHOUT_FLOAT64 else torch.float64
    return real.to_complex() if buffer.is_complex() else real
