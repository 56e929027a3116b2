"""numpy arrays, in a process that need not have numpy."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def is_array(value: Any) -> bool:
    """Return whether `value` is a numpy array. False where numpy is not imported."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def concatenate(arrays: Sequence[Any]) -> Any:
    """Return arrays joined along their first dim."""
    return sys.modules["numpy"].concatenate(arrays)


def to_array(data: Tensor) -> Any:
    """Return a tensor as an array on the CPU; bfloat16, which numpy does not have, becomes float32."""
    data = data.detach().cpu()
    return (data.float() if data.dtype == torch.bfloat16 else data).numpy()


def describe(value: Any) -> str:
    """Return one line on a value: shape and dtype rather than numbers."""
    if isinstance(value, Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        return f"Tensor{tuple(value.shape)} {dtype} {value.device}"
    if is_array(value):
        return f"ndarray{value.shape} {value.dtype}"
    return repr(value)


def slice_at(number: int, size: int, things: str) -> slice:
    """Return the slice of one of so many things, which may be counted from the end.

    Raises:
        IndexError: there is no such one.
    """
    if not -size <= number < size:
        raise IndexError(f"an index of {size} {things} must be from {-size} to {size - 1}, but is {number}")
    return slice(number % size, number % size + 1)
