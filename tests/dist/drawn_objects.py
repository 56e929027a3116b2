"""Objects of all kinds that travel between ranks, drawn by hypothesis, and what it means that they have arrived.

What is drawn are plans: every rank makes the object for itself. torch's own pickle, by which a test would have to send
it there, can't load all dtypes (uint16 in 2.13).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from torch import Tensor
from torch.nn import Parameter

from lockstep.tree import tree_map

DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.complex64,
    torch.complex128,
    torch.int64,
    torch.int16,
    torch.uint8,
    torch.uint16,
    torch.uint64,
    torch.bool,
)
SHAPES = ((), (0,), (1,), (3,), (2, 3), (0, 4), (2, 1, 3))
LARGE = (2, 2**15)  # 64 KiB and more, whatever the dtype
_ARRAY_DTYPES = ("f8", "f4", "i2", "u8", "?", "c16", "<U3", "M8[s]", ">i4", "record", "O")
_RECORD = np.dtype([("id", "<i4"), ("box", "<f8", (2,)), ("name", "S3")])


@dataclass
class Sample:
    """What users make of their results."""

    id: int
    data: Any


def plans() -> SearchStrategy[Any]:
    """Draw plans of nested objects with tensors and arrays of any kind, at any depth; `made` carries them out."""
    plain = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary() | st.complex_numbers()
    shapes = st.sampled_from([*SHAPES, LARGE])
    tensors = st.builds(
        partial, st.just(_tensor), st.sampled_from(DTYPES), shapes, st.sampled_from(sorted(_FORMS)), st.integers(0, 99)
    )
    arrays = st.builds(
        partial, st.just(_array), st.sampled_from(_ARRAY_DTYPES), shapes, st.sampled_from("CFS"), st.booleans()
    )
    keys = st.text(max_size=3) | st.integers() | st.tuples(st.integers())
    return st.recursive(
        plain | tensors | arrays,
        lambda inner: (
            st.lists(inner, max_size=4)
            | st.tuples(inner, inner)
            | st.dictionaries(keys, inner, max_size=3)
            | st.builds(Sample, st.integers(), inner)
        ),
        max_leaves=6,
    )


def every_tensor(shape: tuple[int, ...]) -> dict[str, Tensor]:
    """Return tensors of one shape, of every dtype and layout."""
    return {f"{dtype}, {form}": _tensor(dtype, shape, form, 7) for dtype in DTYPES for form in _FORMS}


def every_array(shape: tuple[int, ...]) -> dict[str, np.ndarray]:
    """Return arrays of one shape, of every dtype and layout."""
    return {
        f"{dtype}, {order}, {is_writeable}": _array(dtype, shape, order, is_writeable)
        for dtype in _ARRAY_DTYPES
        for order in "CFS"
        for is_writeable in (True, False)
    }


def made(plan: Any) -> Any:
    """Return a new object after a plan, the same on every rank."""
    return tree_map(lambda leaf: leaf() if isinstance(leaf, partial) else leaf, plan)


def assert_same(received: Any, sent: Any) -> None:
    """Assert that `received` is what `sent` was: type for type, bit for bit."""
    assert type(received) is type(sent)
    if isinstance(sent, Tensor):
        assert (received.dtype, received.shape) == (sent.dtype, sent.shape)
        assert received.requires_grad == sent.requires_grad
        assert torch.equal(_bytes(received), _bytes(sent))
    elif isinstance(sent, np.ndarray):
        # numpy itself pickles some arrays in native byte order, and some read-only ones as writable.
        assert (received.dtype.newbyteorder("="), received.shape) == (sent.dtype.newbyteorder("="), sent.shape)
        assert received.flags.writeable or not sent.flags.writeable
        if sent.dtype.hasobject:
            assert received.tolist() == sent.tolist()
        else:
            assert received.tobytes() == sent.astype(received.dtype).tobytes()
        assert received.flags.f_contiguous or not sent.flags.f_contiguous
    elif isinstance(sent, dict):
        assert list(received) == list(sent)
        assert_same(list(received.values()), list(sent.values()))
    elif isinstance(sent, list | tuple):
        assert len(received) == len(sent)
        for one, other in zip(received, sent, strict=True):
            assert_same(one, other)
    elif isinstance(sent, Sample):
        for field in fields(sent):
            assert_same(getattr(received, field.name), getattr(sent, field.name))
    else:
        assert repr(received) == repr(sent)  # for the sake of nan


def _bytes(data: Tensor) -> Tensor:
    # Into new memory: a view as bytes needs a last dim of stride 1, even where it is empty.
    return torch.empty(data.numel(), dtype=data.dtype).copy_(data.detach().flatten()).view(torch.uint8)


def _tensor(dtype: torch.dtype, shape: tuple[int, ...], form: str, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    count = math.prod(shape)
    if dtype is torch.bool:
        return _FORMS[form](torch.rand(shape, generator=generator) < 0.5)
    raw = torch.randint(0, 256, (count * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return _FORMS[form](raw.view(dtype).reshape(shape))


def _every_second(data: Tensor) -> Tensor:
    return torch.stack([data, data], dim=-1)[..., 0]


def _with_grad(data: Tensor) -> Tensor:
    return data.requires_grad_() if data.dtype.is_floating_point and data.dtype.itemsize > 1 else data


# Ways to lie in memory. Where the dtype does not know one, the tensor stays as it is.
_FORMS = {
    "plain": lambda x: x,
    "strided": _every_second,
    "transposed": lambda x: x.movedim(0, -1) if x.dim() > 1 else x,
    "expanded": lambda x: x[None].expand(2, *x.shape),
    "conjugate": lambda x: x.conj(),
    "negative": lambda x: x.conj().imag if x.is_complex() else x,
    "with grad": _with_grad,
    "not a leaf": lambda x: _with_grad(x).clone(),
    "parameter": lambda x: Parameter(x, requires_grad=x.dtype is torch.float32),
}


def _array(dtype: str, shape: tuple[int, ...], order: str, is_writeable: bool) -> np.ndarray:
    numbers = np.arange(math.prod(shape)) % 251
    if dtype == "O":
        data = np.array([f"object {number}" for number in numbers[:5]], dtype=object)
    elif dtype == "record":
        data = np.zeros(shape, _RECORD)
        data["id"] = numbers.reshape(shape)
        data["name"] = b"abc"
    else:
        data = numbers.astype(dtype).reshape(shape)
    if order == "S" and data.ndim:
        data = np.repeat(data, 2, axis=-1)[..., ::2]
    elif order == "F":
        data = np.asfortranarray(data)
    data.flags.writeable = is_writeable
    return data
