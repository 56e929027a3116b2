"""Many values reduced as few tensors: one for each dtype."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from lockstep.dist.arguments import require_tensor
from lockstep.dist.groups import Group
from lockstep.dist.packets import SLOT_BYTES, failure_in, pack_failure, require_no_failure
from lockstep.dist.parcels import swap_objects
from lockstep.dist.reducing import all_reduce
from lockstep.dist.reductions import op_name, reduction
from lockstep.dist.slots import swap_slots
from lockstep.errors import CollectiveMismatchError

_DIGEST_BYTES = 32
_NUMBERS = ((bool, torch.bool), (int, torch.int64), (float, torch.float64), (complex, torch.complex128))

# Path, dtype and shape of every leaf.
_Structure: TypeAlias = tuple[tuple[str, torch.dtype, tuple[int, ...]], ...]


class _Plan(NamedTuple):
    """What follows from a structure alone.

    Attributes:
        slot: the message that shows to the other ranks, as a digest, which structure it is.
        bundles: for each dtype, the places of its leaves in the order that all ranks share, and whether all of them
            have one shape.
    """

    slot: bytes
    bundles: tuple[tuple[torch.dtype, tuple[int, ...], bool], ...]


def reduce_leaves(
    items: list[tuple[str, Any]], op: object, here: Group, dtype: torch.dtype | None = None
) -> list[Tensor]:
    """Return every leaf's reduction, in `dtype` or its own, on its device; some are views of one tensor.

    **Collective**: every rank, with the same structure; the order of the leaves is free.
    """
    tensors, name, plan = _agreed(items, op, here, dtype)
    reduced = list(tensors)
    for _, places, is_uniform in plan.bundles:
        members = [tensors[place] for place in places]
        device = members[0].device if here.pg is None else here.comm_device
        joined = join([x if x.device == device else x.to(device) for x in members], is_uniform)
        all_reduce(joined, name, here.pg)
        here.keep(joined)
        for place, result in zip(places, part(joined, members, is_uniform), strict=True):
            home = tensors[place].device
            reduced[place] = result if home == device else result.to(home)
    return reduced


@torch.no_grad()
def join(tensors: Sequence[Tensor], is_uniform: bool) -> Tensor:
    """Return one contiguous tensor with the elements of all; they share dtype and device.

    Args:
        tensors: at least one.
        is_uniform: whether they share their shape, too.
    """
    if is_uniform:
        return torch.stack(tuple(tensors))  # a fifth of the time of the general case, which counts for scalars
    return torch.cat([x.reshape(-1) for x in tensors])


def part(joined: Tensor, like: Sequence[Tensor], is_uniform: bool) -> Sequence[Tensor]:
    """Return the parts that `join` put together, shaped as they were, as views."""
    if is_uniform:
        return joined.unbind()
    parts = torch.split_with_sizes(joined, [x.numel() for x in like])
    return [one.view(x.shape) for one, x in zip(parts, like, strict=True)]


@contextmanager
def telling(here: Group) -> Iterator[None]:
    """Tell the others, who wait for this rank's structure, what keeps it from sending one."""
    try:
        yield
    except Exception as error:
        swap_slots(pack_failure(error), here)
        raise


def _agreed(
    items: list[tuple[str, Any]], op: object, here: Group, dtype: torch.dtype | None
) -> tuple[list[Tensor], str, _Plan]:
    """Return the leaves as tensors, when every rank has shown that its own can be reduced, and that all are alike."""
    with telling(here):
        name = op_name(op)
        tensors = [_as_tensor(path, leaf, dtype) for path, leaf in items]
        structure = tuple([(item[0], x.dtype, x.shape) for item, x in zip(items, tensors, strict=True)])
        plan = _plan_of(structure)
        for one_dtype, _, _ in plan.bundles:
            reduction(name, one_dtype)
    if here.pg is not None:
        slots = swap_slots(plan.slot, here)
        if any(other != plan.slot for other in slots):
            require_no_failure([failure_in(other) for other in slots], here)
            raise _mismatch(_lines(structure), here)
    return tensors, name, plan


@lru_cache(maxsize=256)
def _plan_of(structure: _Structure) -> _Plan:
    """Return the plan; mostly it was made before, as training reduces the same things again and again."""
    digest = hashlib.blake2b(repr(_lines(structure)).encode(), digest_size=_DIGEST_BYTES).digest()
    bundles: dict[torch.dtype, list[int]] = {}
    # By path: in dicts, every rank has an order of its own.
    for place in sorted(range(len(structure)), key=lambda place: structure[place][0]):
        bundles.setdefault(structure[place][1], []).append(place)
    return _Plan(
        digest.rjust(SLOT_BYTES, b"\0"),
        tuple(
            (dtype, tuple(bundles[dtype]), len({structure[place][2] for place in bundles[dtype]}) == 1)
            for dtype in sorted(bundles, key=str)
        ),
    )


def _lines(structure: _Structure) -> list[str]:
    return sorted(f"{path}: {str(dtype).removeprefix('torch.')}{list(shape)}" for path, dtype, shape in structure)


def _mismatch(lines: list[str], here: Group) -> CollectiveMismatchError:
    """Return the error that lists what each rank has beyond what all share. **Collective**: every rank."""
    structures = [set(other) for other in swap_objects(lines, here)]
    shared = set.intersection(*structures)
    table = "\n".join(
        f"  rank {rank}: {', '.join(sorted(structure - shared)) or '(nothing else)'}"
        for rank, structure in enumerate(structures)
    )
    return CollectiveMismatchError(
        f"all ranks must hand in the same keys, shapes and dtypes; beyond the {len(shared)} that they share they have\n"
        f"{table}"
    )


def _as_tensor(path: str, leaf: Any, dtype: torch.dtype | None) -> Tensor:
    if not isinstance(leaf, Tensor):
        leaf = _tensor_of(path or "data", leaf)
    require_tensor(path or "data", leaf)
    tensor: Tensor = leaf if dtype is None else leaf.detach().to(dtype)
    return tensor


def _tensor_of(path: str, leaf: Any) -> Tensor:
    if is_of_numpy(leaf):
        numpy = sys.modules["numpy"]
        try:
            return torch.from_numpy(numpy.array(leaf, dtype=leaf.dtype.newbyteorder("=")))
        except TypeError as error:
            raise TypeError(
                f"`{path}` must be an array of numbers that torch knows, but is one of {leaf.dtype}. "
                "Other objects go through all_gather_object"
            ) from error
    if isinstance(leaf, int) and not -(2**63) <= leaf < 2**63:
        raise ValueError(f"`{path}` must be an int that fits into 64 bits, but is {leaf}")
    for kind, dtype in _NUMBERS:
        if isinstance(leaf, kind):
            return torch.tensor(leaf, dtype=dtype, device="cpu")
    raise TypeError(
        f"`{path}` must be a tensor, an array or a number, but is {type(leaf).__name__}. "
        "Other objects go through all_gather_object"
    )


def is_of_numpy(leaf: object) -> bool:
    """Return whether a leaf is an array or a scalar of numpy's."""
    # Asked without importing numpy: where nobody has imported it, nothing is.
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(leaf, numpy.ndarray | numpy.generic)
