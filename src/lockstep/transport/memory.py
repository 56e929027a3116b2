"""Tensors as the bytes that are sent."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from lockstep.device import copy_into

# Dtypes that every backend moves by name; all others travel as bytes.
_NATIVE_DTYPES = frozenset(
    {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.uint8, torch.int32, torch.int64}
)  # fmt: skip


def copy_all(data: Sequence[Tensor], results: Sequence[Tensor]) -> None:
    """Copy each result into its tensor, as `copy_into` does, unless they are the same tensor."""
    for one, result in zip(data, results, strict=True):
        if result is not one:
            copy_into(one, used_here(result))


def used_here(staged: Tensor) -> Tensor:
    """Return memory of lockstep's own that the present stream reads, and another one may have been given it.

    It is then given to nobody else before that stream has read it.
    """
    if not staged.is_cpu:
        staged.record_stream(torch.accelerator.current_stream(staged.device))
    return staged


def is_plain_memory(data: Tensor) -> bool:
    """Return whether a tensor's memory holds exactly its values, in order, so that bytes may be written there."""
    return data.is_contiguous() and not data.is_neg() and not data.is_conj()


def as_bytes(data: Tensor) -> Tensor:
    """Return the bytes of a contiguous tensor, as a flat uint8 view of the same memory."""
    # as_strided, because view(dtype) fails for a 0-dim tensor, and for one element of a strided view, which counts as
    # contiguous whatever its stride.
    return data.detach().as_strided((data.numel(),), (1,)).view(torch.uint8)


def as_native(wire: Tensor) -> Tensor:
    """Return a contiguous tensor unchanged, or as bytes if not every backend supports its dtype."""
    return wire if wire.dtype in _NATIVE_DTYPES else as_bytes(wire)


def bytes_of(data: Tensor) -> ctypes.Array[ctypes.c_char]:
    """Return a writable buffer over a contiguous CPU tensor's memory, which it keeps alive."""
    buffer = (ctypes.c_char * (data.numel() * data.element_size())).from_address(data.data_ptr())
    buffer._owner = data  # type: ignore[attr-defined]  # the buffer borrows the tensor's memory
    return buffer
