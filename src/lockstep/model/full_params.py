"""Gathering sharded parameters in full for a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from lockstep.dist import is_main_process
from lockstep.model.shards import reshard


@contextmanager
def full_parameters(
    model: nn.Module, recurse: bool, writeback: bool, rank0_only: bool, offload_to_cpu: bool, with_grads: bool
) -> Iterator[None]:
    """Gather every parameter of a sharded model in full, as a plain parameter in its own dtype.

    Args:
        model: a model that `fully_shard` has been applied to.
        recurse: also the parameters of the modules inside, not only `model`'s own.
        writeback: keep the changes made inside; each rank keeps its own shard of its full parameters.
        rank0_only: only rank 0 gets the parameters in full; needs `writeback=False`.
        offload_to_cpu: keep the full parameters in CPU memory.
        with_grads: also gather their gradients in full; changes of these are not written back.

    **Collective**: every rank of the model's mesh. **Cost**: the memory of all parameters, and one all-gather each.

    Raises:
        ValueError: `rank0_only` with `writeback`.
    """
    if rank0_only and writeback:
        raise ValueError("`writeback` must be False with `rank0_only`, because the other ranks hold nothing to write")
    reshard(model)
    sites: list[tuple[nn.Module, str, nn.Parameter]] = [
        (module, name, parameter)
        for module in (model.modules() if recurse else [model])
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False)
        if isinstance(parameter, DTensor)
    ]
    full: dict[nn.Parameter, nn.Parameter] = {}
    for sharded in dict.fromkeys(parameter for _, _, parameter in sites):
        gathered = nn.Parameter(_full(sharded, offload_to_cpu), requires_grad=sharded.requires_grad)
        if with_grads and sharded.grad is not None:
            gathered.grad = _full(sharded.grad, offload_to_cpu)
        full[sharded] = sharded if rank0_only and not is_main_process() else gathered
    for owner, name, sharded in sites:
        setattr(owner, name, full[sharded])
    try:
        yield
    finally:
        for owner, name, sharded in sites:
            setattr(owner, name, sharded)
    if writeback:
        with torch.no_grad():
            for sharded, parameter in full.items():
                sharded.copy_(shard_like(parameter, sharded))


def shard_like(value: Tensor, like: Tensor) -> Tensor:
    """Return `value`, which every rank has in full, sharded like `like`. Nothing is sent."""
    if not isinstance(like, DTensor):
        return value
    whole = value.to(like.device_mesh.device_type)
    sharded = distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)
    return sharded.to(like.device)  # a different device if parameters are offloaded


def gather_full(tensor: Tensor) -> Tensor:
    """Return a tensor in full: `tensor` itself if it is not sharded.

    **Collective**: every rank of its mesh.
    """
    if not isinstance(tensor, DTensor):
        return tensor
    # One axis at a time: torch warns about gathering several at once, if one dim is split twice.
    placements = list(tensor.placements)
    for axis in range(len(placements)):
        placements[axis] = Replicate()
        tensor = tensor.redistribute(placements=placements)
    return tensor.to_local()


@torch.no_grad()
def _full(tensor: Tensor, offload_to_cpu: bool) -> Tensor:
    assert isinstance(tensor, DTensor)
    full = gather_full(tensor)
    if full.untyped_storage().data_ptr() == tensor.to_local().untyped_storage().data_ptr():
        full = full.clone()  # this rank holds all of it; changes without writeback must not be seen
    return full.cpu() if offload_to_cpu else full
