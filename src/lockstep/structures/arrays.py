"""Functions for tensors and numpy arrays."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
import torch
from torch import Tensor


def to_array(data: Tensor) -> Any:
    """Return a tensor as a numpy array on the CPU; bfloat16, which numpy does not support, becomes float32."""
    data = data.detach().cpu()
    return (data.float() if data.dtype == torch.bfloat16 else data).numpy()


def describe(value: Any) -> str:
    """Return a short description of a value: for tensors and arrays, the shape and dtype instead of the numbers."""
    if isinstance(value, Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        return f"Tensor{tuple(value.shape)} {dtype} {value.device}"
    if isinstance(value, np.ndarray):
        return f"ndarray{value.shape} {value.dtype}"
    return repr(value)


def slice_at(index: Any, size: int, things: str, allowed: str = "an int or a slice") -> slice:
    """Return the slice that an int or a slice selects out of `size` items; a negative int counts from the end.

    Args:
        index: the int or slice.
        size: the number of items.
        things: what the items are, for messages.
        allowed: what the index may be, for messages.

    Raises:
        IndexError: the int is out of range.
        TypeError: the index is something else.
    """
    if isinstance(index, slice):
        return index
    if isinstance(index, bool) or not hasattr(index, "__index__"):
        raise TypeError(f"an index of {things} must be {allowed}, but is {index!r} of {type(index).__name__}")
    number = operator.index(index)
    if not -size <= number < size:
        raise IndexError(f"an index of {size} {things} must be from {-size} to {size - 1}, but is {number}")
    return slice(number % size, number % size + 1)
