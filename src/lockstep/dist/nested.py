"""Many values at once: dicts, parameter lists and trees, in as few collectives as their dtypes allow."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Iterable, MutableMapping
from numbers import Integral
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp
from torch.distributed.device_mesh import DeviceMesh

from lockstep.dist.arguments import NOT_GIVEN, either, group_rank, require_memory, require_tensor
from lockstep.dist.bundles import is_of_numpy, join, part, reduce_leaves, telling
from lockstep.dist.gradients import ENDS_HERE, STAYS_LOCAL, warn_of_lost_gradients
from lockstep.dist.groups import GroupLike, resolve
from lockstep.dist.guard import check_call, watch
from lockstep.dist.parcels import spread_object, swap_objects
from lockstep.dist.reducing import all_reduce
from lockstep.dist.reductions import op_name, reduction
from lockstep.tree import tree_items, tree_unflatten

T = TypeVar("T")
D = TypeVar("D", bound=MutableMapping[Any, Any])

_ALONE_MIN_BYTES = 2**20
_MIB = 2**20


def all_reduce_dict(
    data: D = NOT_GIVEN,
    op: str | ReduceOp.RedOpType = "sum",
    group: GroupLike = None,
    to_float: bool = False,
    *,
    py_dict: D = NOT_GIVEN,
) -> D:
    """Reduce every value of a dict over all ranks, in place, and return the dict.

    Args:
        data: tensors, arrays and Python numbers by key; the order of the keys is free. Tensors are reduced in place,
            the others replaced.
        op: as for `all_reduce`.
        group: where; None is the default group.
        to_float: reduce everything in float32, so that one collective does for all and means need not be whole; the
            entries become tensors of float32 then.
        py_dict: `data` by its other published name.

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
    data = either("data", data, "py_dict", py_dict)
    here = resolve(group)
    check_call("all_reduce_dict", here, op)
    with telling(here):
        if not isinstance(data, MutableMapping):
            raise TypeError(f"`data` must be a dict, but is {type(data).__name__}. Lists and others: all_reduce_tree")
        values = [(repr(key), value) for key, value in data.items()]
        if any(isinstance(x, Tensor) and x.requires_grad and not x.is_leaf for _, x in values):
            warn_of_lost_gradients("all_reduce_dict", STAYS_LOCAL)
    reduced = reduce_leaves(values, op, here, torch.float32 if to_float else None)
    with torch.no_grad():
        for (key, value), result in zip(list(data.items()), reduced, strict=True):
            if isinstance(value, Tensor) and value.dtype == result.dtype:
                value.copy_(result)
            else:
                data[key] = result.clone() if to_float else _as_leaf(result, value)
    return data


def all_reduce_tree(data: T, op: str | ReduceOp.RedOpType = "sum", group: GroupLike = None) -> T:
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
    here = resolve(group)
    check_call("all_reduce_tree", here, op)
    with telling(here):  # of a tree that can't be walked
        items = list(tree_items(data))
        if any(isinstance(leaf, Tensor) and leaf.requires_grad for _, leaf in items):
            warn_of_lost_gradients("all_reduce_tree", ENDS_HERE)
    reduced = reduce_leaves(items, op, here)
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
    return swap_objects(data, here, on_graph=lambda: warn_of_lost_gradients("all_gather_tree", ENDS_HERE))


def broadcast_tree(data: T, src: int = 0, group: GroupLike = None) -> T:
    """Return rank `src`'s tree on every rank.

    **Collective**: every rank of the group; what the others hand in is not looked at. **Cost**: as `broadcast_object`.

    **Example (2 ranks)**::

        >>> from lockstep.dist import broadcast_tree, get_rank
        >>> broadcast_tree({"a": torch.tensor([get_rank()])}, src=1)
        {'a': tensor([1])}
    """
    here = resolve(group)
    src = group_rank("src", src, here)
    check_call("broadcast_tree", here, src)
    received: T = spread_object(data, src, here, lambda: warn_of_lost_gradients("broadcast_tree", ENDS_HERE))
    return received


def all_reduce_params(
    params: Iterable[Tensor],
    coalesce: bool = True,
    bucket_size_mb: float = -1,
    op: str | ReduceOp.RedOpType = "sum",
    group: GroupLike = None,
) -> None:
    """Reduce many tensors over all ranks, in place.

    Args:
        params: tensors or parameters, also as a generator; the same on every rank in number, order, shape and dtype.
            What is among them twice is reduced once.
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
    with watch("all_reduce_params", here):
        tensors = _listed(params)
        name = op_name(op)
        for index, tensor in enumerate(tensors):
            require_tensor(f"params[{index}]", tensor)
            require_memory(f"params[{index}]", tensor)
            reduction(name, tensor.dtype)
    if any(x.requires_grad and not x.is_leaf for x in tensors):
        warn_of_lost_gradients("all_reduce_params", STAYS_LOCAL)
    limit_bytes = sys.maxsize if bucket_size_mb <= 0 else int(bucket_size_mb * _MIB)
    alone_from = min(_ALONE_MIN_BYTES, limit_bytes) if coalesce else 0
    handles = [all_reduce(x, name, here.pg, async_op=True) for x in tensors if x.nbytes >= alone_from]
    buckets = _buckets([x for x in tensors if x.nbytes < alone_from], limit_bytes)
    uniform = [len({x.shape for x in bucket}) == 1 for bucket in buckets]
    flats = [join(bucket, alike) for bucket, alike in zip(buckets, uniform, strict=True)]
    handles += [all_reduce(flat, name, here.pg, async_op=True) for flat in flats]
    refusal: ValueError | None = None
    for handle in handles:
        try:
            handle.wait()
        except ValueError as error:  # the mean of these integers; the others are on their way all the same
            refusal = refusal or error
    with torch.no_grad():
        for bucket, flat, alike in zip(buckets, flats, uniform, strict=True):
            for tensor, reduced in zip(bucket, part(flat, bucket, alike), strict=True):
                tensor.copy_(reduced)
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


def _listed(params: Any) -> list[Tensor]:
    if isinstance(params, Tensor):
        return [params]
    if isinstance(params, str) or not isinstance(params, Iterable):
        raise TypeError(f"`params` must be tensors, but is {type(params).__name__}. Of a module: module.parameters()")
    return list({id(tensor): tensor for tensor in params}.values())  # what is there twice is reduced once


def _as_leaf(reduced: Tensor, leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return reduced.clone()
    if is_of_numpy(leaf):
        array = reduced.cpu().numpy().copy()
        return array if isinstance(leaf, sys.modules["numpy"].ndarray) else array[()]
    return reduced.item()


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
