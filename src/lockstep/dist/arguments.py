"""Wrong calls: what every rank can see by itself, before anything is sent."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lockstep.dist.groups import Group, resolve


def group_rank(name: str, rank: int, group: Group) -> int:
    """Return `rank` if it is a rank within `group`.

    Raises:
        TypeError: it is no int.
        ValueError: it is out of range.
    """
    if isinstance(rank, bool) or not isinstance(rank, int):
        raise TypeError(f"`{name}` must be an int, but is {rank!r} ({group.here})")
    if not 0 <= rank < group.size:
        raise ValueError(
            f"`{name}` must be a rank within the group, 0 to {group.size - 1}, but is {rank} ({group.here})"
        )
    return rank


def require_tensor(name: str, data: object) -> None:
    """Raise TypeError unless `data` is a dense tensor."""
    if not isinstance(data, Tensor):
        raise TypeError(
            f"`{name}` must be a tensor, but is {type(data).__name__} ({resolve().here}). "
            "Nested data go through all_reduce_tree, all_gather_tree, broadcast_tree"
        )
    if data.layout is not torch.strided:
        raise TypeError(f"`{name}` must be dense, but is {data.layout}. Use data.to_dense()")


def require_list(name: str, tensors: Sequence[Tensor], here: Group) -> None:
    """Raise unless `tensors` has one dense tensor for each rank."""
    if not isinstance(tensors, Sequence):
        raise TypeError(
            f"`{name}` must be a list of tensors, one for each rank, but is {type(tensors).__name__} ({here.here})"
        )
    if len(tensors) != here.size:
        raise ValueError(
            f"`{name}` must have {here.size} entries, one for each rank, but has {len(tensors)} ({here.here})"
        )
    for index, tensor in enumerate(tensors):
        require_tensor(f"{name}[{index}]", tensor)


def require_alike(name: str, tensor: Tensor, model_name: str, model: Tensor, here: Group) -> None:
    """Raise ValueError unless `tensor` has shape and dtype of `model`."""
    if tensor.shape != model.shape or tensor.dtype != model.dtype:
        raise ValueError(
            f"`{name}` must be like `{model_name}`, {tuple(model.shape)} {model.dtype}, but is {tuple(tensor.shape)} "
            f"{tensor.dtype} ({here.here})"
        )
