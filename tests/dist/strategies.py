"""Tensors for all ranks of a group, drawn by hypothesis, and a way to lay them out in memory on each rank."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from torch import Tensor

from lockstep.dist import get_rank
from lockstep.testing import run_ranks

from .reference import OPS

NO_GROUP = 0
SIZES = (NO_GROUP, 1, 2, 3, 4)

INTS = (
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.uint16,
    torch.int32,
    torch.uint32,
    torch.int64,
    torch.uint64,
)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
COMPLEX = (torch.complex64, torch.complex128)
REDUCIBLE = (torch.bool, *INTS, *FLOATS, *COMPLEX)
ODD = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu, torch.float4_e2m1fn_x2, torch.bits16)

LAYOUTS = ("plain", "transposed", "strided", "offset")
SHAPES = ((), (0,), (1,), (5,), (2, 3), (0, 2), (3, 1, 2))
LARGE_SHAPES = ((600,), (40, 25))  # more than fits into a header, whatever the dtype


@contextmanager
def gradients_may_end() -> Iterator[None]:
    """Let collectives take tensors that require grad without a warning."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".* is given a tensor that requires grad", UserWarning)
        yield


def run_on(size: int, body: Callable[..., Any], *args: Any) -> list[Any]:
    """Return what `body` returns on each rank of a group of `size`, or in this process, where no group exists."""
    return [body(*args)] if size == NO_GROUP else run_ranks(size, body, *args)


class Sent:
    """A tensor of any dtype that can be printed, and sent to a rank and back; torch 2.13 can't do that with all."""

    def __init__(self, data: Tensor) -> None:
        self.data = data

    def __repr__(self) -> str:
        shown = self.data.tolist() if self.data.dtype in REDUCIBLE and self.data.numel() < 100 else "..."
        return f"{str(self.data.dtype).removeprefix('torch.')}{list(self.data.shape)}: {shown}"

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (bytes(bytes_of(self.data).tolist()), self.data.dtype, tuple(self.data.shape))


@dataclass(frozen=True)
class Drawn:
    """One tensor for each rank, and how it lies in memory there."""

    parts: list[Sent]
    layout: str = "plain"
    requires_grad: bool = False

    @property
    def tensors(self) -> list[Tensor]:
        return [part.data for part in self.parts]

    def here(self) -> Laid:
        """Return this rank's."""
        return lay_out(self.parts[get_rank()].data, self.layout, self.requires_grad)


@dataclass(frozen=True)
class Laid:
    """A tensor in memory, and what lies between and around its elements, which is nobody's to change."""

    data: Tensor
    gaps: Tensor = field(default_factory=lambda: torch.zeros(0))

    def has_clean_gaps(self) -> bool:
        return not bytes_of(self.gaps).any()


def lay_out(values: Tensor, layout: str, requires_grad: bool = False) -> Laid:
    """Return a new tensor with these values."""
    if values.dim() == 0 or values.numel() == 0:
        layout = "plain"
    if layout == "plain":
        laid = Laid(values.clone())
    elif layout == "transposed":
        reversed_dims = tuple(reversed(range(values.dim())))
        laid = Laid(values.permute(reversed_dims).contiguous().permute(reversed_dims))
    elif layout == "strided":
        room = zeros((*values.shape[:-1], 2 * values.shape[-1]), values.dtype)
        laid = Laid(room[..., ::2], room[..., 1::2])
    else:
        room = zeros((values.numel() + 2,), values.dtype)
        laid = Laid(room[1:-1].view(values.shape), room[:: values.numel() + 1])
    laid.data.copy_(values)
    laid.data.requires_grad_(requires_grad)
    return laid


def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.zeros(prod(shape) * dtype.itemsize, dtype=torch.uint8).view(dtype).view(shape)


def _received(raw: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> Sent:
    return Sent(torch.tensor(list(raw), dtype=torch.uint8).view(dtype).view(shape))


def bytes_of(data: Tensor) -> Tensor:
    """Return what a tensor holds as bytes: something that can be compared for every dtype."""
    return torch.empty_like(data, memory_format=torch.contiguous_format).copy_(data.detach()).view(-1).view(torch.uint8)


def same_bytes(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors agree in dtype, shape and every bit, also those of a NaN."""
    return one.dtype is other.dtype and one.shape == other.shape and torch.equal(bytes_of(one), bytes_of(other))


@st.composite
def tensors(draw: Callable[..., Any], dtype: torch.dtype, shape: tuple[int, ...]) -> Sent:
    """Draw a tensor of one dtype and shape."""
    elements = draw(st.lists(_elements(dtype), min_size=prod(shape), max_size=prod(shape)))
    return Sent(torch.tensor(elements, dtype=dtype).reshape(shape))


@st.composite
def any_tensors(draw: Callable[..., Any]) -> Sent:
    """Draw a tensor of any dtype and shape, small or larger than a header, from random bytes."""
    dtype = draw(st.sampled_from([*REDUCIBLE, *ODD]))
    shape = draw(st.sampled_from([*SHAPES, *LARGE_SHAPES]))
    return Sent(raw_tensor(dtype, shape, draw(st.integers(0, 2**16))))


def raw_tensor(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> Tensor:
    """Return a tensor of random bytes."""
    generator = torch.Generator().manual_seed(seed)
    highest = 2 if dtype is torch.bool else 256
    raw = torch.randint(0, highest, (prod(shape) * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).view(shape)


@st.composite
def drawn(draw: Callable[..., Any], size: int, dtype: torch.dtype, *, alike: bool | None = None) -> Drawn:
    """Draw one tensor for each rank, of one dtype and shape; `alike` makes them equal on all ranks."""
    shape = draw(st.sampled_from(SHAPES))
    if draw(st.booleans()) if alike is None else alike:
        parts = [draw(tensors(dtype, shape))] * max(size, 1)
    else:
        parts = [draw(tensors(dtype, shape)) for _ in range(max(size, 1))]
    requires_grad = draw(st.booleans()) and (dtype.is_floating_point or dtype.is_complex)
    return Drawn(parts, draw(st.sampled_from(LAYOUTS)), requires_grad)


def reductions() -> SearchStrategy[tuple[str, torch.dtype]]:
    """Draw an operation and a dtype that it has a meaning for."""
    return st.sampled_from([(op, dtype) for op in OPS for dtype in REDUCIBLE if has_meaning(op, dtype)])


def has_meaning(op: str, dtype: torch.dtype) -> bool:
    if dtype.is_complex:
        return op in ("sum", "mean")
    return not dtype.is_floating_point or op not in ("band", "bor", "bxor")


def _elements(dtype: torch.dtype) -> SearchStrategy[Any]:
    if dtype is torch.bool:
        return st.booleans()
    # Sums of these are exact in every float type; products are not.
    eighths = st.integers(-16, 16).map(lambda n: n / 8)
    if dtype.is_complex:
        return st.builds(complex, eighths, eighths)
    if dtype.is_floating_point:
        return eighths
    limits = torch.iinfo(dtype)
    # Multiples of 12 have whole means over up to four ranks.
    twelves = st.integers(-(-limits.min // 12), limits.max // 12).map(lambda n: 12 * n)
    return twelves | st.integers(limits.min, limits.max) | st.sampled_from([limits.min, limits.max])
