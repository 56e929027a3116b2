"""Collectives on many values at once: dicts, lists of parameters and trees, in as few messages as dtypes allow."""

from __future__ import annotations

import hashlib
import secrets
import sys
from collections.abc import Iterable, MutableMapping, Sequence
from contextlib import ExitStack, suppress
from functools import lru_cache, partial
from typing import Any, TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from lockstep.calls import grouped, unlike_most
from lockstep.device import copy_into
from lockstep.dist.consistency import check_call
from lockstep.dist.gradients import warn_of_lost_gradients
from lockstep.dist.pickling import all_gather_pickled, broadcast_pickled
from lockstep.dist.reduce import start_reduction
from lockstep.dist.validate import NOT_GIVEN, either, is_int, require_rank, require_tensor
from lockstep.errors import CollectiveMismatchError
from lockstep.groups import Comm, GroupLike, resolve
from lockstep.transport.control import exchange, report_failure
from lockstep.transport.reduce_ops import OpLike, op_name, reduction
from lockstep.tree import tree_items, tree_map

T = TypeVar("T")
D = TypeVar("D", bound=MutableMapping[Any, Any])

_MIB = 2**20
_CPU = torch.device("cpu")
_NUMBERS = ((bool, torch.bool), (int, torch.int64), (float, torch.float64), (complex, torch.complex128))


def all_reduce_dict(
    data: D = NOT_GIVEN,
    op: OpLike = "sum",
    group: GroupLike = None,
    to_float: bool = False,
    *,
    py_dict: D = NOT_GIVEN,
) -> D:
    """Reduce every value of a dict over all ranks, in place, and return the dict.

    Args:
        data: tensors, numpy arrays and Python numbers by key; the keys may be in any order. Tensors are reduced in
            place, other values are replaced.
        op: as for `all_reduce`.
        group: the process group; None is the default group.
        to_float: reduce everything in float32, in one collective; means need not be whole numbers then. Every entry,
            none of which may be complex, becomes a float32 tensor.
        py_dict: an alias for `data`.

    **Collective**: every rank of the group, with the same keys, shapes and dtypes.

    **Raises**: CollectiveMismatchError on every rank if they differ, naming ranks and keys; TypeError or ValueError on
    a rank with a value that can't be reduced, PeerError on the others; ValueError on every rank if the mean of integers
    is not a whole number. If it raises, `data` is unchanged.

    **Cost**: one exchange of 256 bytes between the hosts, and one all_reduce for each dtype. Values of an
    accelerator stay there; numbers and values of the CPU among them are moved there and back.

    **Example (2 ranks)**::

        >>> from lockstep.dist import all_reduce_dict, get_rank
        >>> losses = {"loss": torch.tensor(1.0 + get_rank()), "samples": 8}
        >>> all_reduce_dict(losses)
        {'loss': tensor(3.), 'samples': 16}
    """
    data = either("data", data, "py_dict", py_dict)
    comm = resolve(group)
    check_call("all_reduce_dict", comm, str(op), compares=False)
    with report_failure(comm):
        if not isinstance(data, MutableMapping):
            raise TypeError(f"`data` must be a dict, but is {type(data).__name__}. Lists and others: all_reduce_tree")
        values = [(repr(key), value) for key, value in data.items()]
        warn_of_lost_gradients("all_reduce_dict", filled=data.values())
    reduced = _reduce_leaves(values, op, comm, torch.float32 if to_float else None, is_filled=True)
    for (key, value), result in zip(list(data.items()), reduced, strict=True):
        if isinstance(value, Tensor) and value.dtype == result.dtype:
            copy_into(value, result)
        else:
            data[key] = result.clone() if to_float else _as_leaf(result, value)
    return data


def all_reduce_tree(data: T, op: OpLike = "sum", group: GroupLike = None) -> T:
    """Return a tree with every leaf reduced over all ranks; `data` is unchanged.

    Args:
        data: any tree of tensors, numpy arrays and numbers; the keys of its dicts may be in any order.
        op: as for `all_reduce`.
        group: the process group; None is the default group.

    **Collective**, **Raises**, **Cost**: as `all_reduce_dict`.

    **Example (2 ranks)**::

        >>> from lockstep.dist import all_reduce_tree, get_rank
        >>> all_reduce_tree({"hits": [get_rank(), 2]})
        {'hits': [1, 4]}
    """
    comm = resolve(group)
    check_call("all_reduce_tree", comm, str(op), compares=False)
    with report_failure(comm):  # of a tree that can't be walked
        items = list(tree_items(data))
        warn_of_lost_gradients("all_reduce_tree", [leaf for _, leaf in items])
    reduced = _reduce_leaves(items, op, comm)
    leaves = (_as_leaf(result, leaf) for result, (_, leaf) in zip(reduced, items, strict=True))
    return tree_map(lambda _: next(leaves), data)  # type: ignore[no-any-return]


def all_gather_tree(data: T, group: GroupLike = None) -> list[T]:
    """Return every rank's tree, in rank order. The trees may differ in structure, shapes and dtypes.

    **Collective**, **Raises**, **Cost**: as `all_gather_object`.

    **Example (2 ranks)**::

        >>> from lockstep.dist import all_gather_tree, get_rank
        >>> all_gather_tree((get_rank(), torch.ones(get_rank())))
        [(0, tensor([])), (1, tensor([1.]))]
    """
    comm = resolve(group)
    check_call("all_gather_tree", comm, compares=False)
    return all_gather_pickled(data, comm, partial(warn_of_lost_gradients, "all_gather_tree"))


def broadcast_tree(data: T, src: int = 0, group: GroupLike = None) -> T:
    """Return rank `src`'s tree on every rank.

    **Collective**: every rank of the group; what the others pass is ignored. **Cost**: as
    `broadcast_object`.

    **Example (2 ranks)**::

        >>> from lockstep.dist import broadcast_tree, get_rank
        >>> broadcast_tree({"a": torch.tensor([get_rank()])}, src=1)
        {'a': tensor([1])}
    """
    comm = resolve(group)
    src = require_rank("src", src, comm)
    check_call("broadcast_tree", comm, src, compares=False)
    warn = partial(warn_of_lost_gradients, "broadcast_tree")
    return broadcast_pickled(data, src, comm, warn)  # type: ignore[no-any-return]


def all_reduce_params(
    params: Iterable[Tensor],
    coalesce: bool = True,
    bucket_size_mb: float = -1,
    op: OpLike = "sum",
    group: GroupLike = None,
) -> None:
    """Reduce many tensors over all ranks, in place.

    Args:
        params: tensors or parameters, also as a generator; the same on every rank in number, order, shape and dtype. A
            tensor that occurs twice is reduced once.
        coalesce: send tensors below 1 MiB together; larger ones gain nothing from being copied into a bucket.
        bucket_size_mb: maximum size of what is sent together, in MiB; -1 sets no limit.
        op: as for `all_reduce`.
        group: the process group; None is the default group.

    **Collective**: every rank of the group.

    **Raises**: as `all_reduce`; if the mean of some integers is not a whole number, only after all others have been
    reduced, but for those of the same bucket.

    **Cost**: one all_reduce for each large tensor and each bucket of small ones, all in flight at once; a copy of
    the small ones in memory. The ranks compare their calls once for all of them.

    **Example (2 ranks)**::

        >>> from lockstep.dist import all_reduce_params
        >>> weights = [torch.ones(2), torch.ones(1, dtype=torch.int64)]
        >>> all_reduce_params(iter(weights))
        >>> weights
        [tensor([2., 2.]), tensor([2])]
    """
    comm = resolve(group)
    tensors = _listed(params)
    name = op_name(op)
    for index, tensor in enumerate(tensors):
        require_tensor(f"params[{index}]", tensor, is_filled=True)
        reduction(name, tensor.dtype)
    warn_of_lost_gradients("all_reduce_params", filled=tensors)
    limit_bytes = sys.maxsize if bucket_size_mb <= 0 else int(bucket_size_mb * _MIB)
    large_from = min(_MIB, limit_bytes) if coalesce else 0
    buckets = _buckets([x for x in tensors if x.nbytes < large_from], limit_bytes)
    flats = [_joined(bucket) for bucket in buckets]
    large = [x for x in tensors if x.nbytes >= large_from]
    check_call("all_reduce_params", comm, name, *large, *flats)  # one comparison for all
    handles = [start_reduction(x, None, name, comm, async_op=True) for x in (*large, *flats)]
    with ExitStack() as stack:  # what is last here comes first; an error, after all others
        for bucket, flat in zip(buckets, flats, strict=True):
            for tensor, reduced in zip(bucket, _parts(flat, bucket), strict=True):
                stack.callback(copy_into, tensor, reduced)
        for handle in handles:
            stack.callback(handle.wait)


def sync_random_seed(
    seed: int | GroupLike = None, device: str | torch.device | None = None, group: GroupLike = None
) -> int:
    """Return one seed on every rank: rank 0's `seed`, or a random one if that is None.

    Args:
        seed: rank 0's seed, 0 to 2**63 - 1; the other ranks' is ignored. A group given here is taken as `group`.
        device: ignored, for compatibility; the group determines the device.
        group: the process group; None is the default group.

    **Collective**: every rank of the group. **Raises**: ValueError on every rank if rank 0's seed is out of range or
    not an int.

    **Example (2 ranks)**::

        >>> from lockstep.dist import get_rank, sync_random_seed
        >>> sync_random_seed(42 + get_rank())
        42
    """
    if isinstance(seed, ProcessGroup | DeviceMesh):
        seed, group = None, seed
    comm = resolve(group)
    check_call("sync_random_seed", comm, compares=False)
    # 31 bits: accepted by the generators of numpy and Python, and by data loaders
    agreed = broadcast_pickled(secrets.randbelow(2**31) if seed is None else seed, 0, comm)
    if not is_int(agreed) or not 0 <= agreed < 2**63:
        raise ValueError(f"`seed` must be an int from 0 to 2**63 - 1, but is {agreed!r} on rank 0 ({comm.this_rank})")
    return int(agreed)


def _listed(params: Any) -> list[Tensor]:
    if isinstance(params, Tensor):
        return [params]
    if isinstance(params, str) or not isinstance(params, Iterable):
        raise TypeError(f"`params` must be tensors, but is {type(params).__name__}. Of a module: module.parameters()")
    return list({id(tensor): tensor for tensor in params}.values())  # a tensor that occurs twice is reduced once


def _as_leaf(reduced: Tensor, leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return reduced.clone()
    if isinstance(leaf, np.ndarray | np.generic):
        array = reduced.cpu().numpy().copy()
        return array if isinstance(leaf, np.ndarray) else array[()]
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


# Path, dtype and shape of every leaf.
_Structure: TypeAlias = tuple[tuple[str, torch.dtype, tuple[int, ...]], ...]


def _reduce_leaves(
    items: list[tuple[str, Any]], op: object, comm: Comm, dtype: torch.dtype | None = None, *, is_filled: bool = False
) -> list[Tensor]:
    """Return every leaf's reduction, in `dtype` or the leaf's own, on its device; some are views of one tensor.

    They travel from CPU to CPU if all leaves of all ranks are there, else from device to device.

    **Collective**: every rank, with the same structure; the leaves may be in any order.
    """
    with report_failure(comm):
        name = op_name(op)
        tensors = [_as_tensor(path, leaf, dtype, is_filled) for path, leaf in items]
        structure = tuple([(item[0], x.dtype, x.shape) for item, x in zip(items, tensors, strict=True)])
        digest, indices_of = _plan_of(structure)
        for leaf_dtype in indices_of:
            reduction(name, leaf_dtype)
        is_on_cpu = comm.pg is None or ("cpu" in comm.devices and all(x.is_cpu for x in tensors))
    received = exchange(comm, bytes([is_on_cpu]) + digest)
    if any(one[1:] != digest for one in received):
        raise _mismatch(_lines(structure), comm)
    travels_on = _CPU if all(one[0] for one in received) else comm.comm_device
    reduced = list(tensors)
    for indices in indices_of.values():
        members = [tensors[index] for index in indices]
        device = members[0].device if comm.pg is None else travels_on
        are_on_cpu = all(x.is_cpu for x in members)
        joined = _joined(members if are_on_cpu else [x.to(device) for x in members])
        joined = joined.to(device)  # in one copy
        # The exchange has compared the calls.
        start_reduction(joined, None, name, comm, async_op=False).wait()
        if are_on_cpu:
            joined = joined.cpu()  # in one read of the device
        for index, result in zip(indices, _parts(joined, members), strict=True):
            reduced[index] = result.to(tensors[index].device)
    return reduced


@torch.no_grad()
def _joined(tensors: Sequence[Tensor]) -> Tensor:
    """Return one flat tensor with all elements of `tensors`, which share dtype and device."""
    return torch.cat([x.reshape(-1) for x in tensors])


def _parts(joined: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Return what `_joined` has joined, as views in the original shapes."""
    parts = torch.split_with_sizes(joined, [x.numel() for x in like])
    return [one.view(x.shape) for one, x in zip(parts, like, strict=True)]


@lru_cache(maxsize=256)
def _plan_of(structure: _Structure) -> tuple[bytes, dict[torch.dtype, list[int]]]:
    """Return a digest of the structure, and for each dtype the indices of its leaves, in an order that all ranks share.

    It is usually cached, as training reduces the same structures again.
    """
    digest = hashlib.blake2b(repr(_lines(structure)).encode(), digest_size=32).digest()
    indices_of: dict[torch.dtype, list[int]] = {}
    # By path, because the order of a dict may differ between ranks.
    for index in sorted(range(len(structure)), key=lambda index: structure[index][0]):
        indices_of.setdefault(structure[index][1], []).append(index)
    return digest, dict(sorted(indices_of.items(), key=lambda item: str(item[0])))


def _lines(structure: _Structure) -> list[str]:
    return sorted(f"{path}: {str(dtype).removeprefix('torch.')}{list(shape)}" for path, dtype, shape in structure)


def _mismatch(lines: list[str], comm: Comm) -> CollectiveMismatchError:
    """Return the error that lists, for each rank, what not all ranks have. **Collective**: every rank."""
    assert comm.calls is not None  # one process agrees with itself
    number = comm.calls.number
    call = comm.calls.call(number)
    assert call is not None, "it is the one that this rank makes"
    gathered = all_gather_pickled((lines, call.site), comm)
    structures = [set(structure) for structure, _ in gathered]
    shared = set.intersection(*structures)
    table = {
        rank: f"{', '.join(sorted(structure - shared)) or '(nothing else)'} at {site}"
        for rank, (structure, (_, site)) in enumerate(zip(structures, gathered, strict=True))
    }
    return CollectiveMismatchError(
        f"ranks of {comm.name} must hand in the same keys, shapes and dtypes in call {number}; beyond the "
        f"{len(shared)} that they share they have\n{grouped(table)}",
        failed_ranks=[comm.ranks[rank] for rank in unlike_most(dict(enumerate(map(frozenset, structures))))],
    )


def _as_tensor(path: str, leaf: Any, dtype: torch.dtype | None, is_filled: bool) -> Tensor:
    tensor = leaf if isinstance(leaf, Tensor) else _tensor_of(path or "data", leaf)
    # What is converted is replaced, not filled.
    require_tensor(path or "data", tensor, is_filled=is_filled and dtype in (None, tensor.dtype))
    if dtype is not None and tensor.is_complex():
        raise TypeError(
            f"`{path}` must be real to be reduced in {dtype}, but is {tensor.dtype}. Leave out to_float, or hand in "
            "its parts, .real and .imag"
        )
    return tensor if dtype is None else tensor.detach().to(dtype)


def _tensor_of(path: str, leaf: Any) -> Tensor:
    found = type(leaf).__name__
    if isinstance(leaf, np.ndarray | np.generic):
        with suppress(TypeError):  # torch does not know its dtype
            return torch.from_numpy(np.array(leaf, dtype=leaf.dtype.newbyteorder("=")))
        found = f"an array of {leaf.dtype}, which torch does not know"
    if isinstance(leaf, int) and not -(2**63) <= leaf < 2**63:
        raise ValueError(f"`{path}` must be an int that fits into 64 bits, but is {leaf}")
    for kind, dtype in _NUMBERS:
        if isinstance(leaf, kind):
            return torch.tensor(leaf, dtype=dtype, device="cpu")
    raise TypeError(
        f"`{path}` must be a tensor, an array or a number, but is {found}. Other objects go through all_gather_object"
    )
