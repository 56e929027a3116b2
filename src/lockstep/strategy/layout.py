"""From the layout that a tensor has to the one that is wanted: whole, or sharded over some mesh."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from lockstep.dist import get_rank, get_world_size
from lockstep.model.full_params import gather_full, shard_like


def laid_out_as(state: Mapping[str, Any], like: Mapping[str, Any], *, copy: bool = False) -> dict[str, Any]:
    """Return a nested state with its tensors laid out as those of `like` under the same keys.

    Args:
        state: the tensors that are wanted.
        like: the layout that is wanted.
        copy: copy also the tensors that need no conversion, unless they are those of `like`.

    **Collective**: every rank, where a tensor is sharded otherwise than it is wanted. **Cost**: an all-gather of each
    such tensor; one at a time is whole.
    """
    return {key: _converted(value, like.get(key), copy) for key, value in state.items()}


def own_rows(full: Tensor) -> Tensor:
    """Return a tensor that every rank has whole as one that is sharded by rows, of which each rank keeps its own.

    They are kept in CPU memory: for states that are made whole one tensor at a time, and would not fit at once.
    """
    ranks = get_world_size()
    if ranks == 1 or full.dim() == 0:
        return full.detach().to("cpu", copy=True)
    rows = full.detach().chunk(ranks)
    own = rows[get_rank()] if get_rank() < len(rows) else full[:0]
    mesh = init_device_mesh("cpu", (ranks,))
    local = own.detach().to("cpu", copy=True)
    return DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=full.shape, stride=full.stride())


def _converted(value: Any, like: Any, copy: bool) -> Any:
    if isinstance(value, Mapping) and isinstance(like, Mapping):
        return laid_out_as(value, like, copy=copy)
    if not isinstance(value, Tensor) or not isinstance(like, Tensor):
        return value
    if _layout(value) == _layout(like):
        return value.clone() if copy and value is not like else value
    return shard_like(gather_full(value), like)


def _layout(tensor: Tensor) -> Any:
    return (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else None
