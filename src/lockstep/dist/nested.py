"""Many values at once: dicts, parameter lists and trees, in as few collectives as their dtypes allow."""

from __future__ import annotations

import hashlib
import secrets
import sys
from collections.abc import Iterable, MutableMapping, Sequence
from numbers import Integral
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from lockstep.dist.arguments import group_rank, require_tensor
from lockstep.dist.groups import Group, GroupLike, resolve
from lockstep.dist.guard import check_call
from lockstep.dist.packets import SLOT_BYTES, failure_in, pack_failure, require_no_failure
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
_DIGEST_BYTES = 32
_NUMBERS = ((bool, torch.bool), (int, torch.int64), (float, torch.float64), (complex, torch.complex128))


def all_reduce_dict(data: D, op: str = "sum", group: GroupLike = None, to_float: bool = False) -> D:
    """Reduce every value of a dict over all ranks, in place, and return the dict.

    Args:
        data: tensors, arrays and Python numbers by key; the order of the keys is free. Tensors are reduced in place,
            the others replaced.
        op: as for `all_reduce`.
        group: where; None is the default group.
        to_float: reduce everything in float32, so that one collective does for all and means need not be whole; the
            entries become tensors of float32 then.

    **Collective**: every rank of the group, with the same keys, shapes and dtypes.

    **Raises**: CollectiveMismatchError on every rank where they differ, naming ranks and keys; TypeError or ValueError
    on a rank with a value that can't be reduced, PeerError on the others; ValueError on every rank where the mean of
    integers is no whole number. Nothing is changed then.

    **Cost**: one message of 512 bytes from each rank to each, and one all_reduce for each dtype.

    **Example (2 ranks)**::

        >>> from lockstep.dist import all_reduce_dict, get_rank
        >>> losses = {"loss": torch.tensor(1.0 + get_rank()), "samples": 8}
        >>> all_reduce_dict(losses)
        {'loss': tensor(3.), 'samples': 16}
    """
    if not isinstance(data, MutableMapping):
        raise TypeError(f"`data` must be a dict, but is {type(data).__name__}. Lists and others: all_reduce_tree")
    values = [(repr(key), value) for key, value in data.items()]
    reduced = _reduced(values, op, resolve(group), torch.float32 if to_float else None)
    with torch.no_grad():
        for (key, value), result in zip(list(data.items()), reduced, strict=True):
            if isinstance(value, Tensor) and value.dtype == result.dtype:
                value.copy_(result)
            else:
                data[key] = result.clone() if to_float else _as_leaf(result, value)
    return data


def all_reduce_tree(data: T, op: str = "sum", group: GroupLike = None) -> T:
    """Return a tree with every leaf reduced over all ranks; `data` stays as it is.

    Args:
        data: any tree of tensors, numpy arrays and numbers; the order of keys in its dicts is free.
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

    **Collective**: every rank of the group.

    **Raises**: as `all_reduce`; where the mean of some integers is no whole number, only after all have been reduced.

    **Cost**: one all_reduce for each large tensor and each bucket of small ones, all in flight at once; a copy of
    the small ones in memory.

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
    refusal: ValueError | None = None
    for handle in handles:
        try:
            handle.wait()
        except ValueError as error:  # the mean of these integers; the others are on their way all the same
            refusal = refusal or error
    with torch.no_grad():
        for bucket, flat in zip(buckets, flats, strict=True):
            for tensor, part in zip(bucket, _parted(flat, bucket), strict=True):
                tensor.copy_(part)
    if refusal is not None:
        raise refusal


def sync_random_seed(
    seed: int | GroupLike = None, device: str | torch.device | None = None, group: GroupLike = None
) -> int:
    """Return one seed on every rank: rank 0's `seed`, or a random one where that is None.

    Args:
        seed: what rank 0 proposes, 0 to 2**63 - 1; that of others is not looked at. A group in this place is the group.
        device: taken for the sake of older callers; the group knows where it talks.
        group: where; None is the default group.

    **Collective**: every rank of the group. **Raises**: ValueError on every rank where rank 0's seed is none.

    **Example (2 ranks)**::

        >>> from lockstep.dist import get_rank, sync_random_seed
        >>> sync_random_seed(42 + get_rank())
        42
    """
    if isinstance(seed, ProcessGroup | DeviceMesh):
        seed, group = None, seed
    here = resolve(group)
    check_call("sync_random_seed", here)
    # 31 bits: what numpy's and Python's generators and data loaders all take
    agreed = spread_object(secrets.randbelow(2**31) if seed is None else seed, 0, here)
    if isinstance(agreed, bool) or not isinstance(agreed, Integral) or not 0 <= int(agreed) < 2**63:
        raise ValueError(f"`seed` must be an int from 0 to 2**63 - 1, but is {agreed!r} on rank 0 ({here.here})")
    return int(agreed)


def _reduced(items: list[tuple[str, Any]], op: str, here: Group, dtype: torch.dtype | None = None) -> list[Tensor]:
    """Return every leaf's reduction, in `dtype` or its own, on its device; some are views of one tensor."""
    name = op_name(op)
    check_call("all_reduce_tree", here, name)
    tensors = _prepared(items, name, here, dtype)
    places: dict[torch.dtype, list[int]] = {}
    # By path: in dicts, every rank has an order of its own.
    for place in sorted(range(len(items)), key=lambda place: items[place][0]):
        places.setdefault(tensors[place].dtype, []).append(place)
    reduced = list(tensors)
    for one_dtype in sorted(places, key=str):
        members = [tensors[place] for place in places[one_dtype]]
        device = members[0].device if here.pg is None else here.comm_device
        joined = _joined([x.to(device) for x in members])
        all_reduce(joined, name, here.pg)
        for place, result in zip(places[one_dtype], _parted(joined, members), strict=True):
            reduced[place] = result.to(tensors[place].device)
    return reduced


def _prepared(items: list[tuple[str, Any]], op: str, here: Group, dtype: torch.dtype | None) -> list[Tensor]:
    """Return the leaves as tensors, when every rank has shown that its own can be reduced, and that all are alike."""
    try:
        tensors = [_as_tensor(path, leaf, dtype) for path, leaf in items]
        for one_dtype in {x.dtype for x in tensors}:
            reduction(op, one_dtype)
    except Exception as error:  # as only this rank can see it, it has to tell the others, who wait
        swap_slots(pack_failure(error), here)
        raise
    if here.pg is None:
        return tensors
    lines = sorted(_described(path, x) for (path, _), x in zip(items, tensors, strict=True))
    slot = bytearray(SLOT_BYTES)
    slot[-_DIGEST_BYTES:] = hashlib.blake2b(repr(lines).encode(), digest_size=_DIGEST_BYTES).digest()
    slots = swap_slots(slot, here)
    require_no_failure([failure_in(other) for other in slots], here)
    if any(other != slot for other in slots):
        raise _mismatch(lines, here)
    return tensors


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


def _described(path: str, data: Tensor) -> str:
    return f"{path}: {str(data.dtype).removeprefix('torch.')}{list(data.shape)}"


def _as_tensor(path: str, leaf: Any, dtype: torch.dtype | None) -> Tensor:
    tensor = leaf if isinstance(leaf, Tensor) else _tensor_of(path or "data", leaf)
    require_tensor(path or "data", tensor)
    return tensor if dtype is None else tensor.detach().to(dtype)


def _tensor_of(path: str, leaf: Any) -> Tensor:
    if _is_of_numpy(leaf):
        return torch.from_numpy(sys.modules["numpy"].array(leaf))
    if isinstance(leaf, int) and not -(2**63) <= leaf < 2**63:
        raise ValueError(f"`{path}` must be an int that fits into 64 bits, but is {leaf}")
    for kind, dtype in _NUMBERS:
        if isinstance(leaf, kind):
            return torch.tensor(leaf, dtype=dtype, device="cpu")
    raise TypeError(
        f"`{path}` must be a tensor, an array or a number, but is {type(leaf).__name__}. "
        "Other objects go through all_gather_object"
    )


def _as_leaf(reduced: Tensor, leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return reduced.clone()
    if _is_of_numpy(leaf):
        array = reduced.cpu().numpy().copy()
        return array if isinstance(leaf, sys.modules["numpy"].ndarray) else array[()]
    return reduced.item()


def _is_of_numpy(leaf: object) -> bool:
    # Asked without importing numpy: where nobody has imported it, nothing is.
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(leaf, numpy.ndarray | numpy.generic)


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
