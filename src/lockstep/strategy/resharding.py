"""Resharding: from the sharding that a tensor has to the requested one, whole or sharded over some mesh."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from lockstep.dist import get_rank, get_world_size
from lockstep.model.full_params import gather_full, shard_like


def reshard_as(state: Mapping[str, Any], like: Mapping[str, Any]) -> dict[str, Any]:
    """Return a nested state with its tensors sharded like those of `like` under the same keys.

    **Collective**: every rank, if the sharding of a tensor has to change. **Cost**: an all-gather of each such tensor;
    only one at a time is whole in memory.
    """
    return {key: _converted(value, like.get(key)) for key, value in state.items()}


def reshard_like(value: Tensor, like: Tensor | None) -> Tensor:
    """Return a tensor sharded like another one, or whole; if nothing has to change, the tensor itself.

    **Collective**: every rank, if its sharding has to change. **Cost**: an all-gather in that case.
    """
    if _sharding(value) == _sharding(like):
        return value
    full = gather_full(value)
    return full if like is None else shard_like(full, like)


def shard_rows(full: Tensor) -> Tensor:
    """Shard by rows a tensor that every rank has whole; each rank keeps its own rows.

    They are copied to CPU memory. Meant for states that are gathered one tensor at a time because all would not fit at
    once.
    """
    ranks = get_world_size()
    if ranks == 1 or full.dim() == 0:
        return full.detach().to("cpu", copy=True)
    rows = full.detach().chunk(ranks)
    own = rows[get_rank()] if get_rank() < len(rows) else full[:0]
    return _of_rows(own.detach().to("cpu", copy=True), full.shape, full.stride())


def template_of_rows(shape: Sequence[int]) -> Tensor:
    """Return a tensor that is sharded like one of `shard_rows`, but takes no memory; its values are meaningless."""
    ranks = get_world_size()
    nothing = torch.zeros(())
    if ranks == 1 or not shape:
        return nothing.expand(tuple(shape))
    most = -(-shape[0] // ranks)
    rows = max(0, min(most, shape[0] - most * get_rank()))
    full = torch.empty(*shape, device="meta")
    return _of_rows(nothing.expand(rows, *shape[1:]), full.shape, full.stride())


def _of_rows(own: Tensor, shape: torch.Size, stride: tuple[int, ...]) -> Tensor:
    mesh = init_device_mesh("cpu", (get_world_size(),))
    return DTensor.from_local(own, mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)


def _converted(value: Any, like: Any) -> Any:
    if isinstance(value, Mapping) and isinstance(like, Mapping):
        return reshard_as(value, like)
    if not isinstance(value, Tensor) or not isinstance(like, Tensor):
        return value
    return reshard_like(value, like)


def _sharding(tensor: Tensor | None) -> Any:
    return (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else None
