"""What the collectives must give, computed in one process with Python's own numbers; what ranks then say."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from math import prod
from operator import and_, or_, xor
from typing import Any

import pytest
import torch
from torch import Tensor

from lockstep.dist import all_reduce, get_dist_info
from lockstep.errors import CollectiveMismatchError, DistError
from lockstep.groups import GroupLike

OPS = ("sum", "mean", "product", "min", "max", "band", "bor", "bxor")
NOT_WHOLE = "the mean is no whole number"

_ON_NUMBERS = {
    "sum": sum,
    "product": prod,
    "min": min,
    "max": max,
    "band": lambda values: reduce(and_, values),
    "bor": lambda values: reduce(or_, values),
    "bxor": lambda values: reduce(xor, values),
}
# bool follows logic: a sum is "any", a product "all".
_ON_BOOL = {**_ON_NUMBERS, "sum": any, "product": all}


def reduced(op: str, parts: Sequence[Tensor]) -> Tensor | str:
    """Return the reduction of all ranks' tensors, or NOT_WHOLE where integers have no whole mean."""
    dtype = parts[0].dtype
    columns = list(zip(*(part.flatten().tolist() for part in parts), strict=True))
    if op == "mean":
        totals = [sum(column) for column in columns]
        if dtype.is_floating_point or dtype.is_complex:
            values: list[Any] = [total / len(parts) for total in totals]
        elif any(total % len(parts) for total in totals):
            return NOT_WHOLE
        else:
            values = [total // len(parts) for total in totals]
    else:
        on_values = _ON_BOOL[op] if dtype is torch.bool else _ON_NUMBERS[op]
        values = [_wrapped(on_values(column), dtype) for column in columns]
    return torch.tensor(values, dtype=dtype).reshape(parts[0].shape)


def assert_is(actual: Tensor, expected: Tensor, op: str) -> None:
    """Check a reduction: exactly, except for the rounding of products and divisions of floats."""
    rounds = op in ("mean", "product") and (expected.is_floating_point() or expected.is_complex())
    tolerance = 4 * torch.finfo(expected.dtype).eps if rounds else 0.0
    torch.testing.assert_close(actual.detach(), expected, rtol=tolerance, atol=0.0)


def assert_group_works(group: GroupLike = None) -> None:
    """Check that the ranks of a group are still in step."""
    rank, size = get_dist_info(group)
    data = torch.tensor([1 + rank])
    all_reduce(data, group=group)
    assert data.item() == sum(range(1, size + 1))


def ones() -> Tensor:
    return torch.ones(2)


def raised(call: Callable[[], object], kind: type[DistError] = CollectiveMismatchError) -> str:
    """Return the message of the error that a call raises."""
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)


def _wrapped(value: Any, dtype: torch.dtype) -> Any:
    """Return the number that is left when a result is cut to the bits of `dtype`."""
    if dtype is torch.bool or dtype.is_floating_point or dtype.is_complex:
        return value
    limits = torch.iinfo(dtype)
    return (value - limits.min) % 2**limits.bits + limits.min
