"""Functions for numpy arrays that do not import numpy."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def is_array(value: Any) -> bool:
    """Return whether `value` is a numpy array. False if numpy is not imported."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def concatenate(arrays: Sequence[Any]) -> Any:
    """Concatenate numpy arrays along their first dim."""
    return sys.modules["numpy"].concatenate(arrays)


def to_array(data: Tensor) -> Any:
    """Return a tensor as a numpy array on the CPU; bfloat16, which numpy does not support, becomes float32."""
    data = data.detach().cpu()
    return (data.float() if data.dtype == torch.bfloat16 else data).numpy()


def describe(value: Any) -> str:
    """Return a short description of a value: for tensors and arrays, the shape and dtype instead of the numbers."""
    if isinstance(value, Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        return f"Tensor{tuple(value.shape)} {dtype} {value.device}"
    if is_array(value):
        return f"ndarray{value.shape} {value.dtype}"
    return repr(value)


def slice_at(number: int, size: int, things: str) -> slice:
    """Return the slice that selects index `number` of `size`; a negative index counts from the end.

    Raises:
        IndexError: `number` is out of range; `things` names the items in the message.
    """
    if not -size <= number < size:
        raise IndexError(f"an index of {size} {things} must be from {-size} to {size - 1}, but is {number}")
    return slice(number % size, number % size + 1)
