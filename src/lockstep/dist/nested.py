"""Many values at once: dicts, parameter lists and trees, in as few collectives as their dtypes allow."""

from __future__ import annotations

import hashlib
import secrets
import sys
from collections.abc import Iterable, MutableMapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from lockstep.dist.arguments import group_rank, require_tensor
from lockstep.dist.groups import Group, GroupLike, resolve
from lockstep.dist.guard import check_call
from lockstep.dist.moving import broadcast
from lockstep.dist.parcels import spread_object, swap_objects
from lockstep.dist.reducing import all_reduce
from lockstep.dist.reductions import op_name, reduction
from lockstep.dist.slots import swap_slots
from lockstep.errors import CollectiveMismatchError
from lockstep.tree import tree_items, tree_unflatten

T = TypeVar("T")
D = TypeVar("D", bound=MutableMapping[Any, Any])

_ALONE_MIN_BYTES = 2**20
_MIB = 2**20


def all_reduce_dict(data: D, op: str = "sum", group: GroupLike = None, to_float: bool = False) -> D:
    """Reduce every value of a dict over all ranks, in place, and return the dict.

    Args:
        data: tensors and Python numbers by key; the order of the keys is free. Tensors are reduced in place, numbers
            replaced.
        op: as for `all_reduce`.
        group: where; None is the default group.
        to_float: reduce everything in float32, so that one collective does for all and means need not be whole; the
            entries are replaced then.

    **Collective**: every rank of the group, with the same keys, shapes and dtypes.

    **Raises**: CollectiveMismatchError on every rank where they differ, naming ranks and keys, before anything is
    reduced;
    ValueError where the mean of integers is no whole number, with nothing changed.

    **Cost**: one message of 32 bytes from each rank to each, and one all_reduce for each dtype.

    **Example (2 ranks)**::

        >>> from lockstep.dist import all_reduce_dict, get_rank
        >>> losses = {"loss": torch.tensor(1.0 + get_rank()), "samples": 8}
        >>> all_reduce_dict(losses)
        {'loss': tensor(3.), 'samples': 16}
    """
    if not isinstance(data, MutableMapping):
        raise TypeError(f"`data` must be a dict, but is {type(data).__name__}. Lists and others: all_reduce_tree")
    here = resolve(group)
    keys = sorted(data, key=str)
    if to_float:
        for key in keys:
            data[key] = torch.as_tensor(data[key], dtype=torch.float32)
    reduced = _reduced([(str(key), data[key]) for key in keys], op, here)
    with torch.no_grad():
        for key, result in zip(keys, reduced, strict=True):
            value = data[key]
            if isinstance(value, Tensor):
                value.copy_(result)
            else:
                data[key] = _as_leaf(result, value)
    return data


def all_reduce_tree(data: T, op: str = "sum", group: GroupLike = None) -> T:
    """Return a tree with every leaf reduced over all ranks; `data` stays as it is.

    Args:
        data: any tree of tensors, numpy arrays and Python numbers.
        op: as for `all_reduce`.
        group: where; None is the default group.

    **Collective**, **Raises**, **Cost**: as `all_reduce_dict`.

    **Example (2 ranks)**::

        >>> from lockstep.dist import all_reduce_tree, get_rank
        >>> all_reduce_tree({"hits": [get_rank(), 2]})
        {'hits': [1, 4]}
    """
    items = list(tree_items(data))
    reduced = _reduced(items, op, resolve(group))
    leaves = [_as_leaf(result, leaf) for result, (_, leaf) in zip(reduced, items, strict=True)]
    return tree_unflatten(data, leaves)  # type: ignore[no-any-return]


def all_gather_tree(data: T, group: GroupLike = None) -> list[T]:
    """Return every rank's tree, in rank order. Trees may differ in everything.

    **Collective**, **Raises**, **Cost**: as `all_gather_object`.

    **Example (2 ranks)**::

        >>> from lockstep.dist import all_gather_tree, get_rank
        >>> all_gather_tree((get_rank(), torch.ones(get_rank())))
        [(0, tensor([])), (1, tensor([1.]))]
    """
    here = resolve(group)
    check_call("all_gather_tree", here)
    return swap_objects(data, here)


def broadcast_tree(data: T, src: int = 0, group: GroupLike = None) -> T:
    """Return rank `src`'s tree on every rank.

    **Collective**: every rank of the group; what the others hand in is not looked at. **Cost**: as `broadcast_object`.

    **Example (2 ranks)**::

        >>> from lockstep.dist import broadcast_tree, get_rank
        >>> broadcast_tree({"a": torch.tensor([get_rank()])}, src=1)
        {'a': tensor([1])}
    """
    here = resolve(group)
    group_rank("src", src, here)
    check_call("broadcast_tree", here, src)
    received: T = spread_object(data, src, here)
    return received


def all_reduce_params(
    params: Iterable[Tensor],
    coalesce: bool = True,
    bucket_size_mb: float = -1,
    op: str = "sum",
    group: GroupLike = None,
) -> None:
    """Reduce many tensors over all ranks, in place.

    Args:
        params: tensors or parameters, also as a generator; the same on every rank in number, order, shape and dtype.
        coalesce: let tensors below 1 MiB travel together; larger ones gain nothing from being copied.
        bucket_size_mb: how much travels together at most, in MiB; -1 sets no limit.
        op: as for `all_reduce`.
        group: where; None is the default group.

    **Collective**: every rank of the group. **Raises**: as `all_reduce`.

    **Cost**: one all_reduce for each large tensor and each bucket of small ones, all in flight at once; a copy of
    the small
    ones in memory.

    **Example (2 ranks)**::

        >>> from lockstep.dist import all_reduce_params
        >>> weights = [torch.ones(2), torch.ones(1, dtype=torch.int64)]
        >>> all_reduce_params(iter(weights))
        >>> weights
        [tensor([2., 2.]), tensor([2])]
    """
    here = resolve(group)
    tensors = [params] if isinstance(params, Tensor) else list(params)
    name = op_name(op)
    for index, tensor in enumerate(tensors):
        require_tensor(f"params[{index}]", tensor)
        reduction(name, tensor.dtype)
    limit_bytes = sys.maxsize if bucket_size_mb <= 0 else int(bucket_size_mb * _MIB)
    alone_from = min(_ALONE_MIN_BYTES, limit_bytes) if coalesce else 0
    handles = [all_reduce(x, name, here.pg, async_op=True) for x in tensors if x.nbytes >= alone_from]
    buckets = _buckets([x for x in tensors if x.nbytes < alone_from], limit_bytes)
    flats = [_joined(bucket) for bucket in buckets]
    handles += [all_reduce(flat, name, here.pg, async_op=True) for flat in flats]
    for handle in handles:
        handle.wait()
    with torch.no_grad():
        for bucket, flat in zip(buckets, flats, strict=True):
            for tensor, part in zip(bucket, _parted(flat, bucket), strict=True):
                tensor.copy_(part)


def sync_random_seed(
    seed: int | GroupLike = None, device: str | torch.device | None = None, group: GroupLike = None
) -> int:
    """Return one seed on every rank: rank 0's `seed`, or a random one where that is None.

    Args:
        seed: what rank 0 proposes, 0 to 2**63 - 1. A group in this place is the group.
        device: taken for the sake of older callers; the group knows where it talks.
        group: where; None is the default group.

    **Collective**: every rank of the group.

    **Example (2 ranks)**::

        >>> from lockstep.dist import get_rank, sync_random_seed
        >>> sync_random_seed(42 + get_rank())
        42
    """
    if isinstance(seed, ProcessGroup | DeviceMesh):
        seed, group = None, seed
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**63):
        raise ValueError(f"`seed` must be an int from 0 to 2**63 - 1, but is {seed!r}")
    # 31 bits: what numpy's and Python's generators and data loaders all take
    agreed = torch.tensor(secrets.randbelow(2**31) if seed is None else seed)
    broadcast(agreed, 0, group)
    return int(agreed.item())


def _reduced(items: list[tuple[str, Any]], op: str, here: Group) -> list[Tensor]:
    """Return every leaf's reduction, as views of one tensor for each dtype."""
    name = op_name(op)
    tensors = [_as_tensor(path, leaf) for path, leaf in items]
    places: dict[torch.dtype, list[int]] = {}
    for place, tensor in enumerate(tensors):
        places.setdefault(tensor.dtype, []).append(place)
    for dtype in places:
        reduction(name, dtype)
    check_call("all_reduce_tree", here, name)
    _require_same_structure(items, tensors, here)
    reduced = list(tensors)
    for dtype in sorted(places, key=str):
        members = [tensors[place] for place in places[dtype]]
        joined = _joined(members if here.pg is None else [x.to(here.comm_device) for x in members])
        all_reduce(joined, name, here.pg)
        for place, result in zip(places[dtype], _parted(joined, members), strict=True):
            reduced[place] = result
    return reduced


def _as_tensor(path: str, leaf: Any) -> Tensor:
    if isinstance(leaf, Tensor):
        require_tensor(path, leaf)
        return leaf
    if isinstance(leaf, bool):
        return torch.tensor(leaf)
    if isinstance(leaf, int):
        return torch.tensor(leaf, dtype=torch.int64)
    if isinstance(leaf, float):
        return torch.tensor(leaf, dtype=torch.float64)
    if _is_array(leaf):
        return torch.from_numpy(leaf.copy())
    raise TypeError(
        f"`{path or 'data'}` must be a tensor, an array or a number, but is {type(leaf).__name__}. "
        "Other objects go through all_gather_object"
    )


def _as_leaf(reduced: Tensor, leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return reduced.clone() if leaf.device == reduced.device else reduced.to(leaf.device)
    if _is_array(leaf):
        return reduced.cpu().numpy().copy()
    return reduced.item()


def _is_array(leaf: object) -> bool:
    # Asked without importing numpy: where nobody has imported it, nothing is one.
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(leaf, numpy.ndarray)


def _require_same_structure(items: list[tuple[str, Any]], tensors: list[Tensor], here: Group) -> None:
    if here.pg is None:
        return
    description = repr([(path, x.dtype, tuple(x.shape)) for (path, _), x in zip(items, tensors, strict=True)])
    digest = hashlib.blake2b(description.encode(), digest_size=32).digest()
    slots = swap_slots(bytearray(digest), here)
    if all(slot == digest for slot in slots):
        return
    lines = [f"{path}: {x.dtype}{list(x.shape)}" for (path, _), x in zip(items, tensors, strict=True)]
    structures = [set(other) for other in swap_objects(lines, here)]
    shared = set.intersection(*structures)
    table = "\n".join(
        f"  rank {rank}: {', '.join(sorted(structure - shared)) or '(nothing else)'}"
        for rank, structure in enumerate(structures)
    )
    raise CollectiveMismatchError(
        f"all ranks must hand in the same keys, shapes and dtypes; beyond the {len(shared)} that they share they have\n"
        f"{table}"
    )


def _buckets(tensors: list[Tensor], limit_bytes: int) -> list[list[Tensor]]:
    """Group tensors by device and dtype, in order, into buckets of at most `limit_bytes`."""
    buckets: list[list[Tensor]] = []
    filling: dict[tuple[torch.device, torch.dtype], tuple[list[Tensor], int]] = {}
    for tensor in tensors:
        key = (tensor.device, tensor.dtype)
        bucket, filled_bytes = filling.get(key, ([], 0))
        if not bucket or filled_bytes + tensor.nbytes > limit_bytes:
            bucket, filled_bytes = [], 0
            buckets.append(bucket)
        bucket.append(tensor)
        filling[key] = (bucket, filled_bytes + tensor.nbytes)
    return buckets


@torch.no_grad()
def _joined(tensors: Sequence[Tensor]) -> Tensor:
    """Return one contiguous tensor with the elements of all; they share dtype and device."""
    if _are_alike(tensors):
        return torch.stack(tuple(tensors))  # a fifth of the time of the general case, which counts for scalars
    return torch.cat([x.reshape(-1) for x in tensors])


def _parted(joined: Tensor, like: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return the parts that `_joined` put together, shaped as they were, as views."""
    if _are_alike(like):
        return joined.unbind()
    parts = torch.split_with_sizes(joined, [x.numel() for x in like])
    return [part.view(x.shape) for part, x in zip(parts, like, strict=True)]


def _are_alike(tensors: Sequence[Tensor]) -> bool:
    shape = tensors[0].shape
    return all(x.shape == shape for x in tensors)
