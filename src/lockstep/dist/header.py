"""Headers: what each rank says of its tensor before tensors of unknown shapes are exchanged."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from lockstep.calls import fingerprint
from lockstep.groups import Comm
from lockstep.transport.control import require_no_failure


class Header(NamedTuple):
    """What a rank says of its tensor.

    Attributes:
        dtype: its dtype.
        shape: its shape.
        on_cpu: whether it travels from CPU to CPU, else between devices.
        expected: fingerprint of what this rank expects to receive; None if it accepts anything.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    on_cpu: bool = True
    expected: int | None = None


def header_of(data: Tensor, on_cpu: bool, expected: Sequence[Tensor] | None = None) -> Header:
    """Return the header of a tensor; `expected`: the tensors that this rank fills, one for each rank."""
    return Header(data.dtype, tuple(data.shape), on_cpu, None if expected is None else _fingerprint(expected))


@lru_cache(maxsize=1024)
def encode(*headers: Header) -> bytes:
    """Return headers as bytes."""
    return json.dumps([(str(dtype).removeprefix("torch."), *rest) for dtype, *rest in headers]).encode()


@lru_cache(maxsize=1024)
def decode(encoded: bytes) -> tuple[Header, ...]:
    """Return the headers of which `encode` has made these bytes."""
    return tuple([Header(getattr(torch, dtype), tuple(shape), *rest) for dtype, shape, *rest in json.loads(encoded)])


def require_expected(headers: Sequence[Header], comm: Comm, name: str) -> None:
    """Raise PeerError, naming the first rank whose list, called `name`, does not fit the tensors of all ranks.

    A rank whose own list is wrong should raise its own error before.
    """
    expected = [header.expected for header in headers]
    if any(one is not None for one in expected):
        actual = _fingerprint(headers)
        refusal = f"ValueError: its `{name}` does not fit the tensors of all ranks"
        require_no_failure([None if one in (None, actual) else refusal for one in expected], comm)


def _fingerprint(tensors: Sequence[Tensor | Header]) -> int:
    """Return a number for the dtypes and shapes of tensors, one of each rank."""
    return fingerprint(tuple([(x.dtype, x.shape) for x in tensors]))
