"""Headers: what each rank says of its tensor before tensors of unknown shapes are exchanged."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from lockstep.groups import Comm
from lockstep.transport.control import require_no_failure

# Sorted, so that the order is the same on every rank.
_DTYPES = sorted({x for x in vars(torch).values() if isinstance(x, torch.dtype)}, key=str)
_CODES = {dtype: code for code, dtype in enumerate(_DTYPES)}
_HEAD = struct.Struct("<4q")  # what the rank expects, dtype, whether on the CPU, number of dims; the dims follow


class Header(NamedTuple):
    """What a rank says of its tensor.

    Attributes:
        dtype: its dtype.
        shape: its shape.
        on_cpu: whether it travels from CPU to CPU, else between devices.
        expected: fingerprint of what this rank expects to receive; 0 if it accepts anything.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    on_cpu: bool = True
    expected: int = 0


def header_of(data: Tensor, on_cpu: bool, expected: Sequence[Tensor] | None = None) -> Header:
    """Return the header of a tensor; `expected`: the tensors that this rank fills, one for each rank."""
    return Header(data.dtype, tuple(data.shape), on_cpu, 0 if expected is None else fingerprint(expected))


@lru_cache(maxsize=1024)
def encode(header: Header) -> bytes:
    """Return a header as bytes."""
    dtype, shape, on_cpu, expected = header
    return _HEAD.pack(expected, _CODES[dtype], on_cpu, len(shape)) + struct.pack(f"<{len(shape)}q", *shape)


@lru_cache(maxsize=1024)
def decode_each(encoded: bytes) -> tuple[Header, ...]:
    """Return the headers of which `encode` has made these bytes, one after the other."""
    headers, start = [], 0
    while start < len(encoded):
        expected, code, on_cpu, ndim = _HEAD.unpack_from(encoded, start)
        shape = struct.unpack_from(f"<{ndim}q", encoded, start + _HEAD.size)
        headers.append(Header(_DTYPES[code], shape, bool(on_cpu), expected))
        start += _HEAD.size + 8 * ndim
    return tuple(headers)


def fingerprint(tensors: Sequence[Tensor | Header]) -> int:
    """Return a number for the dtypes and shapes of tensors, one of each rank; never 0."""
    # Python's hash of integers is the same in every process.
    return hash(tuple([(_CODES[x.dtype], *x.shape) for x in tensors])) or 1


def require_expected(headers: Sequence[Header], comm: Comm, name: str) -> None:
    """Raise PeerError, naming the first rank whose list, called `name`, does not fit the tensors of all ranks.

    A rank whose own list is wrong should raise its own error before.
    """
    expected = [header.expected for header in headers]
    if any(expected):
        actual = fingerprint(headers)
        refusal = f"ValueError: its `{name}` does not fit the tensors of all ranks"
        require_no_failure([None if one in (0, actual) else refusal for one in expected], comm)
