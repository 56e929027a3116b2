"""The reductions (sum, mean, min, ...) for every dtype, and the dtype in which the numbers are sent.

Backends support few dtypes, and not the same ones. A `Reduction` says how one pair of operation and dtype is encoded
for sending, which operation the backend runs, and how the result is decoded, so that every backend gives the same dtype
and values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from lockstep.groups import BIT_OPS

OpName: TypeAlias = Literal["sum", "mean", "avg", "product", "prod", "min", "max", "band", "bor", "bxor"]
OpLike: TypeAlias = OpName | ReduceOp.RedOpType

# What torch calls each operation, and how two tensors are combined.
_OPS: dict[OpName, tuple[Any, Callable[..., Tensor]]] = {
    "sum": (ReduceOp.SUM, torch.add),
    "mean": (ReduceOp.AVG, torch.add),  # the division comes at the end
    "product": (ReduceOp.PRODUCT, torch.mul),
    "min": (ReduceOp.MIN, torch.minimum),
    "max": (ReduceOp.MAX, torch.maximum),
    "band": (ReduceOp.BAND, torch.bitwise_and),
    "bor": (ReduceOp.BOR, torch.bitwise_or),
    "bxor": (ReduceOp.BXOR, torch.bitwise_xor),
}
TORCH_OPS = {name: torch_op for name, (torch_op, _) in _OPS.items()}
# Each name that is known, and the canonical one.
_NAMES: dict[str, OpName] = {**{name: name for name in _OPS}, "avg": "mean", "prod": "product"}
_FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
_NATIVE_INTS = frozenset({torch.int8, torch.uint8, torch.int32, torch.int64})
NATIVE_DTYPES = _FLOATS | _NATIVE_INTS
"""Dtypes that every backend moves by name; all others travel as bytes, or encoded."""
_WIDER_INTS = {torch.int16: torch.int32, torch.uint16: torch.int32, torch.uint32: torch.int64}
_INTS = _NATIVE_INTS | _WIDER_INTS.keys() | {torch.uint64}
_SIGN_BIT = -(2**63)


@dataclass(frozen=True, slots=True)
class Reduction:
    """How one operation runs on one dtype.

    Attributes:
        wire_op: the operation that the backend runs, never an alias.
        encode: contiguous data -> the tensor to send; None if the data is sent unchanged.
        decode: (received tensor, number of ranks) -> result in the original dtype and shape (flat is fine); None if the
            backend's result is already in place.
    """

    wire_op: OpName
    encode: Callable[[Tensor], Tensor] | None = None
    decode: Callable[[Tensor, int], Tensor] | None = None


def op_name(op: object) -> OpName:
    """Return the canonical name of an operation given by name or as `torch.distributed.ReduceOp`.

    **Raises**: ValueError for an unknown operation, naming the known ones.
    """
    if isinstance(op, str):
        known = _NAMES.get(op.lower())
        if known is not None:
            return known
    elif isinstance(op, ReduceOp | ReduceOp.RedOpType):  # 0 and False would also equal SUM
        for name, torch_op in TORCH_OPS.items():
            if op == torch_op:
                return name
    raise ValueError(f"`op` must be one of {', '.join(_OPS)} (or avg, prod, torch's ReduceOp), but is {op!r}")


def combine(parts: Sequence[Tensor], wire_op: OpName, total: Tensor) -> None:
    """Combine the encoded tensors of all ranks as a backend does, in their order.

    Args:
        parts: a tensor of each rank.
        wire_op: the operation, never an alias.
        total: the result. It may be one of the first two parts, which only the first operation reads.
    """
    result, function = parts[0], _OPS[wire_op][1]
    for part in parts[1:]:
        result = function(result, part, out=total)
    if len(parts) == 1:
        total.copy_(result)
    if wire_op == "mean":
        total.div_(len(parts))


@cache
def reduction(op: OpName, dtype: torch.dtype) -> Reduction:
    """Return how `op` runs on `dtype`.

    **Raises**: TypeError if the pair has no meaning (the order of complex numbers, the bits of a float).
    """
    if dtype is torch.bool:
        return _bool_reduction(op)
    if dtype in _INTS:
        return _int_mean(dtype) if op == "mean" else _int_reduction(op, dtype)
    if op in BIT_OPS:
        raise TypeError(f"`op` must not be {op!r} for {dtype}: only integers and bool have bits")
    if dtype in _FLOATS:
        if op == "mean" and dtype.itemsize == 2:
            # The sum of half numbers may overflow where their mean does not (float16), and each addition rounds it.
            return Reduction("mean", torch.Tensor.float, lambda x, n: x.to(dtype))
        if op in ("min", "max"):
            return Reduction(op, partial(_ordered_words, op=op), lambda x, n: _floats_of(x).to(dtype))
        return Reduction(op)
    if dtype.is_complex:
        if op in ("product", "min", "max"):
            raise TypeError(
                f"`op` must be sum or mean for {dtype}, but is {op!r}: backends don't multiply complex numbers, "
                "which have no order either"
            )
        # A view of the same memory: the result is in place.
        return Reduction(op, torch.view_as_real)
    raise TypeError(
        f"`data` must have a dtype that can be reduced, but has {dtype}. Convert it first, e.g. data.float()"
    )


def _ordered_words(data: Tensor, op: OpName) -> Tensor:
    """Return integers in the order of floats; a NaN, which backends may lose, becomes the one that prevails."""
    wide = data.float() if data.dtype.itemsize == 2 else data
    words = wide.view(torch.int64 if wide.dtype.itemsize == 8 else torch.int32)
    limits = torch.iinfo(words.dtype)
    # The bits of negative floats are in the reverse order.
    ordered = torch.where(words < 0, words ^ limits.max, words)
    return ordered.masked_fill_(wide.isnan(), limits.max if op == "max" else limits.min)


def _floats_of(ordered: Tensor) -> Tensor:
    words = torch.where(ordered < 0, ordered ^ torch.iinfo(ordered.dtype).max, ordered)
    return words.view(torch.float64 if words.dtype.itemsize == 8 else torch.float32)


def _bool_reduction(op: OpName) -> Reduction:
    if op == "mean":
        return _int_mean(torch.bool)
    if op == "bxor":
        # True if the count of True is odd; sent as a sum, because NCCL has no bitwise operations.
        return Reduction("sum", lambda x: x.to(torch.int32), lambda x, n: (x & 1).bool())
    any_or_all: OpName = "max" if op in ("sum", "max", "bor") else "min"
    return Reduction(any_or_all, lambda x: x.view(torch.uint8))


def _int_reduction(op: OpName, dtype: torch.dtype) -> Reduction:
    if dtype in _NATIVE_INTS:
        return Reduction(op)
    if dtype in _WIDER_INTS:
        wider = _WIDER_INTS[dtype]
        return Reduction(op, lambda x: x.to(wider), lambda x, n: x.to(dtype))
    if op in ("min", "max"):
        # The order of unsigned numbers is that of signed ones with the top bit flipped.
        return Reduction(
            op,
            lambda x: x.view(torch.int64) ^ _SIGN_BIT,
            lambda x, n: (x ^ _SIGN_BIT).view(torch.uint64),
        )
    # Sums, products and bits of two's complement are the same for both signs.
    return Reduction(op, lambda x: x.view(torch.int64))


def _int_mean(dtype: torch.dtype) -> Reduction:
    return Reduction("sum", _split_words, partial(_mean_of_words, dtype=dtype))


def _split_words(data: Tensor) -> Tensor:
    """Split numbers into two 32-bit words, whose sums over up to 2**31 ranks can't overflow.

    Shapes: any -> [2, *shape], high words first.
    """
    whole = data.view(torch.int64) if data.dtype.itemsize == 8 else data.long()
    low, high = whole & 0xFFFFFFFF, whole >> 32
    if data.dtype is torch.uint64:
        high = high & 0xFFFFFFFF
    return torch.stack([high, low])


def _mean_of_words(total: Tensor, size: int, *, dtype: torch.dtype) -> Tensor:
    # Long division in base 2**32: the remainder of the high word carries into the low one.
    high, low = total
    quotient, rest = high // size, high % size
    low = low + (rest << 32)
    if not bool((low % size == 0).all()):
        raise ValueError(
            f"the mean of {dtype} data must be a whole number, but at least one element's is not. "
            "Convert first, e.g. data.float(), or use op='sum'"
        )
    mean: Tensor = (quotient << 32) + low // size
    return mean.view(dtype) if dtype.itemsize == 8 else mean.to(dtype)
