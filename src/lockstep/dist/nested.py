"""Collectives on many values at once: dicts, lists of parameters and trees, in as few messages as dtypes allow."""

from __future__ import annotations

import hashlib
import secrets
import struct
import sys
from collections.abc import Iterable, MutableMapping, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from math import prod
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from lockstep.calls import grouped, unlike_most
from lockstep.dist.consistency import check_call, report_refusals
from lockstep.dist.gradients import ENDS_HERE, STAYS_LOCAL, warn_of_lost_gradients
from lockstep.dist.header import (
    ON_CPU,
    ON_DEVICE,
    TENSOR_HEADER_BYTES,
    TENSOR_ROOM_BYTES,
    all_gather_header,
    decode_failure,
    report_failure,
    require_no_failure,
)
from lockstep.dist.packed import all_gather_packed, broadcast_packed
from lockstep.dist.reduce import check_of, start_reduction
from lockstep.dist.validate import NOT_GIVEN, either, require_rank, require_tensor
from lockstep.errors import CollectiveMismatchError, DistError
from lockstep.groups import Comm, GroupLike, is_int, resolve
from lockstep.transport.backend import Check
from lockstep.transport.memory import bytes_of
from lockstep.transport.pairs import transport_of
from lockstep.transport.reduce_ops import OpLike, OpName, combine, op_name, reduction
from lockstep.tree import tree_items, tree_unflatten

T = TypeVar("T")
D = TypeVar("D", bound=MutableMapping[Any, Any])

_ALONE_MIN_BYTES = 2**20
_MIB = 2**20
_CPU = torch.device("cpu")
_STATUS = struct.Struct("<q")
_DIGEST_BYTES = 32
_HEAD_BYTES = 16 + _DIGEST_BYTES  # the status, zeros, then the digest
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
        to_float: reduce everything in float32, in one collective; means need not be whole numbers then. Every entry
            becomes a float32 tensor.
        py_dict: an alias for `data`.

    **Collective**: every rank of the group, with the same keys, shapes and dtypes.

    **Raises**: CollectiveMismatchError on every rank if they differ, naming ranks and keys; TypeError or ValueError on
    a rank with a value that can't be reduced, PeerError on the others; ValueError on every rank if the mean of integers
    is not a whole number. If it raises, `data` is unchanged.

    **Cost**: one message of 512 bytes from each rank to each, and one all_reduce for each dtype unless all values fit
    into that message.

    **Example (2 ranks)**::

        >>> from lockstep.dist import all_reduce_dict, get_rank
        >>> losses = {"loss": torch.tensor(1.0 + get_rank()), "samples": 8}
        >>> all_reduce_dict(losses)
        {'loss': tensor(3.), 'samples': 16}
    """
    data = either("data", data, "py_dict", py_dict)
    comm = resolve(group)
    check_call("all_reduce_dict", comm, _named(op))
    with report_failure(comm):
        if not isinstance(data, MutableMapping):
            raise TypeError(f"`data` must be a dict, but is {type(data).__name__}. Lists and others: all_reduce_tree")
        values = [(repr(key), value) for key, value in data.items()]
        if any(isinstance(x, Tensor) and x.requires_grad and not x.is_leaf for _, x in values):
            warn_of_lost_gradients("all_reduce_dict", STAYS_LOCAL)
    reduced = _reduce_leaves(values, op, comm, torch.float32 if to_float else None)
    with torch.no_grad():
        for (key, value), result in zip(list(data.items()), reduced, strict=True):
            if isinstance(value, Tensor) and value.dtype == result.dtype:
                value.copy_(result)
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
    check_call("all_reduce_tree", comm, _named(op))
    with report_failure(comm):  # of a tree that can't be walked
        items = list(tree_items(data))
        if any(isinstance(leaf, Tensor) and leaf.requires_grad for _, leaf in items):
            warn_of_lost_gradients("all_reduce_tree", ENDS_HERE)
    reduced = _reduce_leaves(items, op, comm)
    leaves = [_as_leaf(result, leaf) for result, (_, leaf) in zip(reduced, items, strict=True)]
    return tree_unflatten(data, leaves)  # type: ignore[no-any-return]


def all_gather_tree(data: T, group: GroupLike = None) -> list[T]:
    """Return every rank's tree, in rank order. The trees may differ in structure, shapes and dtypes.

    **Collective**, **Raises**, **Cost**: as `all_gather_object`.

    **Example (2 ranks)**::

        >>> from lockstep.dist import all_gather_tree, get_rank
        >>> all_gather_tree((get_rank(), torch.ones(get_rank())))
        [(0, tensor([])), (1, tensor([1.]))]
    """
    comm = resolve(group)
    check_call("all_gather_tree", comm)
    return all_gather_packed(data, comm, on_graph=lambda: warn_of_lost_gradients("all_gather_tree", ENDS_HERE))


def broadcast_tree(data: T, src: int = 0, group: GroupLike = None) -> T:
    """Return rank `src`'s tree on every rank.

    **Collective**: every rank of the group; what the others pass is ignored. **Cost**: 4 KiB to each rank, and the
    pickled tree if it does not fit into it.

    **Example (2 ranks)**::

        >>> from lockstep.dist import broadcast_tree, get_rank
        >>> broadcast_tree({"a": torch.tensor([get_rank()])}, src=1)
        {'a': tensor([1])}
    """
    comm = resolve(group)
    src = require_rank("src", src, comm)
    check_call("broadcast_tree", comm, src)
    on_graph = partial(warn_of_lost_gradients, "broadcast_tree", ENDS_HERE)
    return broadcast_packed(data, src, comm, on_graph)  # type: ignore[no-any-return]


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
    reduced.

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
    with report_refusals("all_reduce_params", comm):
        tensors = _listed(params)
        name = op_name(op)
        for index, tensor in enumerate(tensors):
            require_tensor(f"params[{index}]", tensor, is_filled=True)
            reduction(name, tensor.dtype)
    if any(x.requires_grad and not x.is_leaf for x in tensors):
        warn_of_lost_gradients("all_reduce_params", STAYS_LOCAL)
    limit_bytes = sys.maxsize if bucket_size_mb <= 0 else int(bucket_size_mb * _MIB)
    alone_from = min(_ALONE_MIN_BYTES, limit_bytes) if coalesce else 0
    buckets = _buckets([x for x in tensors if x.nbytes < alone_from], limit_bytes)
    uniform = [len({x.shape for x in bucket}) == 1 for bucket in buckets]
    flats = [_join(bucket, alike) for bucket, alike in zip(buckets, uniform, strict=True)]
    refusal = _reduce_together([x for x in tensors if x.nbytes >= alone_from] + flats, name, comm)
    with torch.no_grad():
        for bucket, flat, alike in zip(buckets, flats, uniform, strict=True):
            for tensor, reduced in zip(bucket, _part(flat, bucket, alike), strict=True):
                tensor.copy_(reduced)
    if refusal is not None:
        raise refusal


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
    check_call("sync_random_seed", comm)
    # 31 bits: accepted by the generators of numpy and Python, and by data loaders
    agreed = broadcast_packed(secrets.randbelow(2**31) if seed is None else seed, 0, comm)
    if not is_int(agreed) or not 0 <= agreed < 2**63:
        raise ValueError(f"`seed` must be an int from 0 to 2**63 - 1, but is {agreed!r} on rank 0 ({comm.this_rank})")
    return int(agreed)


def _named(op: object) -> str:
    """Return the name of an operation; an unknown one is refused later, on all ranks."""
    with suppress(ValueError):
        return op_name(op)
    return str(op)


def _listed(params: Any) -> list[Tensor]:
    if isinstance(params, Tensor):
        return [params]
    if isinstance(params, str) or not isinstance(params, Iterable):
        raise TypeError(f"`params` must be tensors, but is {type(params).__name__}. Of a module: module.parameters()")
    return list({id(tensor): tensor for tensor in params}.values())  # a tensor that occurs twice is reduced once


def _reduce_together(tensors: Sequence[Tensor], name: OpName, comm: Comm) -> ValueError | None:
    """Reduce tensors in place, all in flight at once, as one call of `all_reduce_params` that is compared once.

    **Returns**: the first error for integers without a whole mean; the other tensors are reduced nevertheless.
    """
    plans = [reduction(name, x.dtype) for x in tensors]
    checks = {check_of([x], None, plan, comm) for x, plan in zip(tensors, plans, strict=True)}
    if len(tensors) != 1 and checks <= {"carried"}:
        checks = {"if due"}
    check: Check = next((one for one in ("before", "tagged", "if due") if one in checks), "carried")
    check_call("all_reduce_params", comm, name, *tensors, check=check)
    last = len(tensors) - 1  # it needs no handle
    handles = [
        start_reduction(x, None, plan, comm, async_op=index < last)
        for index, (x, plan) in enumerate(zip(tensors, plans, strict=True))
    ]
    refusal: ValueError | None = None
    for handle in handles:
        try:
            handle.wait()
        except ValueError as error:
            refusal = refusal or error
        except DistError:  # the others know
            raise
        except BaseException:  # of a signal's handler, for instance: the others wait for this rank
            for one in handles:
                with suppress(DistError, ValueError):
                    one.leave_alone()
            raise
    return refusal


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


class _Bundle(NamedTuple):
    """The leaves of one dtype, which are reduced as one tensor.

    Attributes:
        dtype: their dtype.
        indices: indices of the leaves, in the order that all ranks share.
        is_uniform: whether all of them have one shape.
        numel: total number of elements.
        offset: where their bytes begin in a header that holds all bundles.
    """

    dtype: torch.dtype
    indices: tuple[int, ...]
    is_uniform: bool
    numel: int
    offset: int


class _Plan(NamedTuple):
    """Everything that depends on the structure alone.

    Attributes:
        head: the beginning of the header, which holds a digest of the structure.
        bundles: one for each dtype.
        is_inline: whether the bytes of all bundles fit into the header.
    """

    head: bytes
    bundles: tuple[_Bundle, ...]
    is_inline: bool


def _reduce_leaves(
    items: list[tuple[str, Any]], op: object, comm: Comm, dtype: torch.dtype | None = None
) -> list[Tensor]:
    """Return every leaf's reduction, in `dtype` or the leaf's own, on its device; some are views of one tensor.

    If all leaves of all ranks are on the CPU and fit into the header that compares the structures, they travel in it,
    and each rank reduces them locally, in rank order. This takes one exchange, instead of one plus one for each dtype.
    What is on a device stays there.

    **Collective**: every rank, with the same structure; the leaves may be in any order.
    """
    with report_failure(comm):
        name = op_name(op)
        tensors = [_as_tensor(path, leaf, dtype) for path, leaf in items]
        structure = tuple([(item[0], x.dtype, x.shape) for item, x in zip(items, tensors, strict=True)])
        plan = _plan_of(structure)
        for bundle in plan.bundles:
            reduction(name, bundle.dtype)
    is_on_cpu = "cpu" in comm.devices and all(x.is_cpu for x in tensors)
    device = _CPU if is_on_cpu else comm.comm_device
    joined = []
    for bundle in plan.bundles:
        members = [tensors[index] for index in bundle.indices]
        home = members[0].device if comm.pg is None else device
        joined.append(_join([x if x.device == home else x.to(home) for x in members], bundle.is_uniform))
    headers = None if comm.pg is None else _exchange_structures(plan, joined, structure, comm)
    if headers is None or not plan.is_inline or device.type != "cpu" or not _all_on_cpu(headers):
        if headers is not None and is_on_cpu and not _all_on_cpu(headers):
            joined = [one.to(comm.comm_device) for one in joined]
        for bundle, one in zip(plan.bundles, joined, strict=True):  # the headers have compared the calls
            start_reduction(one, None, reduction(name, bundle.dtype), comm, async_op=False).wait()
            transport_of(comm).keep_alive(one)
    else:
        joined = [
            _reduce_inline(headers, bundle, name, comm).reshape(one.shape).to(one.device)
            for bundle, one in zip(plan.bundles, joined, strict=True)
        ]
    reduced = list(tensors)
    for bundle, reduced_one in zip(plan.bundles, joined, strict=True):
        members, one = [tensors[index] for index in bundle.indices], reduced_one
        if all(x.is_cpu for x in members):
            one = one.cpu()  # in one read of the device
        for index, result in zip(bundle.indices, _part(one, members, bundle.is_uniform), strict=True):
            home = tensors[index].device
            reduced[index] = result if home == result.device else result.to(home)
    return reduced


def _exchange_structures(plan: _Plan, joined: Sequence[Tensor], structure: _Structure, comm: Comm) -> list[bytes]:
    """Return every rank's header, once all ranks have reported reducible leaves of the same structure."""
    header = bytearray(TENSOR_HEADER_BYTES)
    header[: len(plan.head)] = plan.head
    if any(one.device.type != "cpu" for one in joined):
        _STATUS.pack_into(header, 0, ON_DEVICE)
    elif plan.is_inline:
        for bundle, one in zip(plan.bundles, joined, strict=True):
            if bundle.numel:
                header[bundle.offset : bundle.offset + one.nbytes] = bytes_of(one)
    headers = all_gather_header(bytes(header), comm)
    if not all(other.startswith(plan.head[_STATUS.size :], _STATUS.size) for other in headers):
        require_no_failure([decode_failure(other) for other in headers], comm)
        raise _mismatch(_lines(structure), comm)
    return headers


def _all_on_cpu(headers: Sequence[bytes]) -> bool:
    return all(_STATUS.unpack_from(header)[0] == ON_CPU for header in headers)


def _reduce_inline(headers: Sequence[bytes], bundle: _Bundle, name: OpName, comm: Comm) -> Tensor:
    """Reduce one bundle over the headers of all ranks; the result is flat, or shaped as `decode` returns it."""
    plan = reduction(name, bundle.dtype)
    if not bundle.numel:
        return torch.empty(0, dtype=bundle.dtype)
    # A copy for each rank: the encoded tensor may be a view, and the first is reduced in place.
    parts = [
        torch.frombuffer(bytearray(header), dtype=bundle.dtype, count=bundle.numel, offset=bundle.offset)
        for header in headers
    ]
    wires = parts if plan.encode is None else [plan.encode(one) for one in parts]
    combine(wires, plan.wire_op, wires[0])
    return parts[0] if plan.decode is None else plan.decode(wires[0], comm.size)


@torch.no_grad()
def _join(tensors: Sequence[Tensor], is_uniform: bool) -> Tensor:
    """Return one contiguous tensor with all elements of `tensors`, which share dtype and device.

    Args:
        tensors: at least one.
        is_uniform: whether they also share their shape.
    """
    if is_uniform:
        return torch.stack(tuple(tensors))  # a fifth of the general case's time, which matters for scalars
    return torch.cat([x.reshape(-1) for x in tensors])


def _part(joined: Tensor, like: Sequence[Tensor], is_uniform: bool) -> Sequence[Tensor]:
    """Return the parts that `_join` joined, as views in their original shapes."""
    if is_uniform:
        return joined.unbind()
    parts = torch.split_with_sizes(joined, [x.numel() for x in like])
    return [one.view(x.shape) for one, x in zip(parts, like, strict=True)]


@lru_cache(maxsize=256)
def _plan_of(structure: _Structure) -> _Plan:
    """Return the plan; it is usually cached, because training reduces the same structure again and again."""
    digest = hashlib.blake2b(repr(_lines(structure)).encode(), digest_size=_DIGEST_BYTES).digest()
    by_dtype: dict[torch.dtype, list[int]] = {}
    # By path, because the order of a dict may differ between ranks.
    for index in sorted(range(len(structure)), key=lambda index: structure[index][0]):
        by_dtype.setdefault(structure[index][1], []).append(index)
    bundles, offset = [], _HEAD_BYTES
    for dtype in sorted(by_dtype, key=lambda dtype: (-dtype.itemsize, str(dtype))):  # each aligned for its dtype
        shapes = [structure[index][2] for index in by_dtype[dtype]]
        numel = sum(map(prod, shapes))
        bundles.append(_Bundle(dtype, tuple(by_dtype[dtype]), len(set(shapes)) == 1, numel, offset))
        offset += numel * dtype.itemsize
    return _Plan(digest.rjust(_HEAD_BYTES, b"\0"), tuple(bundles), offset <= TENSOR_ROOM_BYTES)


def _lines(structure: _Structure) -> list[str]:
    return sorted(f"{path}: {str(dtype).removeprefix('torch.')}{list(shape)}" for path, dtype, shape in structure)


def _mismatch(lines: list[str], comm: Comm) -> CollectiveMismatchError:
    """Return the error that lists, for each rank, what not all ranks have. **Collective**: every rank."""
    assert comm.calls is not None  # one process agrees with itself
    number = comm.calls.number
    gathered = all_gather_packed((lines, comm.calls.call(number).site), comm)
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


def _as_tensor(path: str, leaf: Any, dtype: torch.dtype | None) -> Tensor:
    tensor = leaf if isinstance(leaf, Tensor) else _tensor_of(path or "data", leaf)
    require_tensor(path or "data", tensor)
    return tensor if dtype is None else tensor.detach().to(dtype)


def _tensor_of(path: str, leaf: Any) -> Tensor:
    if isinstance(leaf, np.ndarray | np.generic):
        try:
            return torch.from_numpy(np.array(leaf, dtype=leaf.dtype.newbyteorder("=")))
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
