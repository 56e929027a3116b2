"""Checks of arguments, which each rank makes on its own before anything is sent; and arguments with two names."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from numbers import Integral
from typing import Any, Final, Literal, TypeAlias, TypeGuard

import torch
from torch import Tensor

from lockstep.dist.header import Header
from lockstep.groups import Comm, resolve


class _NotGiven:
    """The type of `NOT_GIVEN`, the default of arguments for which None is a valid value."""

    def __repr__(self) -> str:
        return "<not given>"


NOT_GIVEN: Final[Any] = _NotGiven()

GROUP_TWICE: Final = "`group` must be given once, but is given by its place and by its name"

# For signatures in which a switch determines what is returned.
Yes: TypeAlias = Literal[True]
No: TypeAlias = Literal[False]


def either(name: str, value: Any, published: str, other: Any) -> Any:
    """Return an argument that callers may pass by one of two names: lockstep's, or that of another library.

    Raises:
        TypeError: both were given, or neither.
    """
    if (value is NOT_GIVEN) != (other is NOT_GIVEN):
        return other if value is NOT_GIVEN else value
    function = sys._getframe(1).f_code.co_name
    if value is NOT_GIVEN:
        raise TypeError(f"{function}() missing 1 required argument: {name!r} (or {published!r})")
    raise TypeError(f"{function}() got both `{name}` and `{published}`, two names of one argument. Give one of them")


def places_given(places: Any, dst: Any, group: Any) -> tuple[Any, Any, Any]:
    """Return list, `dst` and group of a call ``f(data, places, dst, group)``, or ``f(data, dst, group)``."""
    if not isinstance(places, Integral):
        return places, dst, group
    if isinstance(dst, int) and dst == 0:
        return None, places, group
    if group is not None:
        raise TypeError(GROUP_TWICE)
    return None, places, dst


def require_rank(name: str, rank: object, comm: Comm) -> int:
    """Return `rank` as an int (numpy integers are accepted) if it is a rank within the group of `comm`.

    Raises:
        TypeError: it is not an int.
        ValueError: it is out of range.
    """
    if not is_int(rank):
        raise TypeError(f"`{name}` must be an int, but is {rank!r} ({comm.this_rank})")
    if not 0 <= rank < comm.size:
        raise ValueError(
            f"`{name}` must be a rank within the group, 0 to {comm.size - 1}, but is {rank} ({comm.this_rank})"
        )
    return int(rank)


def require_tensor(name: str, data: Any, *, is_filled: bool = False) -> None:
    """Raise TypeError unless `data` is a plain tensor: dense, with its own values in memory.

    With `is_filled` (a result is written to `data`), raise ValueError if elements share memory, as after ``expand``.
    """
    refusal = _refusal_of(data)
    if refusal is not None:
        raise TypeError(f"`{name}` must be {refusal[0]} ({resolve().this_rank}). {refusal[1]}")
    if is_filled and not data.is_contiguous() and torch._debug_has_internal_overlap(data) == 1:
        raise ValueError(
            f"`{name}` must have memory for each of its elements, as a result is written there, but is an expanded "
            f"view, {tuple(data.shape)} with strides {data.stride()} ({resolve().this_rank}). Hand in "
            f"{name}.contiguous() or {name}.clone()"
        )


def _refusal_of(data: object) -> tuple[str, str] | None:
    """Return what is wrong with an argument and what to do; None for a dense tensor with its own values in memory."""
    kind = type(data).__name__
    if not isinstance(data, Tensor):
        return f"a tensor, but is {kind}", "Nested data go through all_reduce_tree, all_gather_tree, broadcast_tree"
    if hasattr(data, "full_tensor") and hasattr(data, "to_local"):
        return (
            f"a plain tensor, but is a {kind}, of which every rank holds a part",
            "Hand in the whole, full_tensor(), or this rank's part, to_local()",
        )
    if data.is_nested:
        return "a plain tensor, but is nested", "Hand in its parts, unbind(), or to_padded_tensor(0.0)"
    if data.layout is not torch.strided:
        return f"dense, but is {data.layout}", "Use to_dense()"
    if data.is_meta:
        return "a tensor with values, but is on the meta device", "Make them first, e.g. with module.to_empty(device)"
    if data.is_quantized:
        return f"a plain tensor, but is quantized, {data.dtype}", "Hand in dequantize() or int_repr()"
    if hasattr(type(data), "__tensor_flatten__"):
        return f"a plain tensor, but is {kind}, which only wraps others", "Hand in what it wraps"
    return None


def require_list(name: str, tensors: Sequence[Tensor], comm: Comm, *, is_filled: bool = False) -> None:
    """Raise unless `tensors` has one tensor for each rank, each accepted by `require_tensor`."""
    if not isinstance(tensors, Sequence):
        raise TypeError(
            f"`{name}` must be a list of tensors, one for each rank, but is {type(tensors).__name__} ({comm.this_rank})"
        )
    if len(tensors) != comm.size:
        raise ValueError(
            f"`{name}` must have {comm.size} entries, one for each rank, but has {len(tensors)} ({comm.this_rank})"
        )
    for index, tensor in enumerate(tensors):
        require_tensor(f"{name}[{index}]", tensor, is_filled=is_filled)


def require_only_on(dst: int, name: str, given: object, comm: Comm) -> None:
    """Raise ValueError if another rank than `dst` gives a list to fill: it would stay as it is."""
    if comm.rank != dst and given is not None and not (isinstance(given, Sequence) and len(given) == 0):
        raise ValueError(
            f"`{name}` must be None except on `dst`, rank {dst}, but is {type(given).__name__} ({comm.this_rank})"
        )


def require_alike(name: str, data: Tensor, like: str, model: Tensor | Header, comm: Comm, remedy: str = "") -> None:
    """Raise ValueError unless `data` has the shape and dtype of `model`; the error calls `model` by the text `like`."""
    if data.shape != model.shape or data.dtype != model.dtype:
        raise ValueError(
            f"`{name}` must be like {like}, {tuple(model.shape)} {model.dtype}, but is {tuple(data.shape)} "
            f"{data.dtype} ({comm.this_rank}){remedy}"
        )


def is_int(value: object) -> TypeGuard[int]:
    """Return whether `value` is an integer (numpy's included), but not a bool."""
    return type(value) is int or (isinstance(value, Integral) and not isinstance(value, bool))
