"""Collectives on Python objects. Large tensors and arrays inside them travel out of band, without a pickled copy.

Each rank sends a header, then what of its pickle did not fit in it, then the large tensors and arrays. A rank whose
object can't be pickled says so in its header, so that all ranks raise together and the group stays in step.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from numbers import Integral
from typing import Any, TypeVar, overload

import torch
from torch import Tensor
from torch.distributed import GroupMember, ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from lockstep.dist.consistency import check_call
from lockstep.dist.groups import Comm, GroupLike, resolve
from lockstep.dist.header import (
    OBJECT_HEADER_BYTES,
    all_gather_header,
    broadcast_header,
    decode_failure,
    encode_failure,
    require_no_failure,
    scatter_header,
)
from lockstep.dist.pickling import Pickled, dump, load
from lockstep.dist.transport import bytes_of, transport_of, wait_all
from lockstep.dist.validate import NOT_GIVEN, either, require_rank
from lockstep.errors import DistError

T = TypeVar("T")

_HEAD = struct.Struct("<4q")  # status (0: no failure), bytes of the body, number of segments, of which tensors'
_EMPTY = bytes(OBJECT_HEADER_BYTES)


@overload
def all_gather_object(data: T, group: GroupLike = ..., /) -> list[T]: ...
@overload
def all_gather_object(data: T, *, group: GroupLike) -> list[T]: ...
@overload
def all_gather_object(*, obj: T, group: GroupLike = ...) -> list[T]: ...
@overload
def all_gather_object(
    data: list[Any] = ..., obj: object = ..., group: GroupLike = ..., *, object_list: list[Any] = ...
) -> None: ...
def all_gather_object(
    data: Any = NOT_GIVEN, obj: Any = NOT_GIVEN, group: GroupLike = None, *, object_list: list[Any] = NOT_GIVEN
) -> list[Any] | None:
    """Give every rank every rank's object, as ``all_gather_object(obj) -> list``, or filling a list in the first place.

    Args:
        data: this rank's object; or the list to fill, with one place for each rank.
        obj: this rank's object, in the filling form. A group in this place is the group of the other form; so is None,
            unless `data` is a list of as many Nones as there are ranks, two or more, which waits to be filled. By
            itself it is `data` by its other published name.
        group: where; None is the default group.
        object_list: `data` of the filling form, by its published name.

    **Collective**: every rank of the group; ranks may mix the two forms.

    **Returns**: the objects in rank order, this rank's own as a copy. Tensors keep dtype, shape and `requires_grad`;
    those from an accelerator arrive on this process's own.

    **Raises**: TypeError on a rank whose object can't be pickled, ValueError on one whose list has not one place for
    each rank, PeerError on the others, before anything large is sent; DistError on a rank that can't load what it
    received, which the others do not notice.

    **Cost**: 4 KiB from each rank, and what does not fit in it. Tensors and arrays of 64 KiB or more are sent from
    their own memory and arrive in theirs; nothing else is held.

    **Example (2 ranks)**::

        >>> from lockstep.dist import all_gather_object, get_rank
        >>> all_gather_object({"rank": get_rank()})
        [{'rank': 0}, {'rank': 1}]
        >>> places = [None, None]
        >>> all_gather_object(places, "ab"[get_rank()])
        >>> places
        ['a', 'b']

    **Source**: PEP 574 (pickle protocol 5).
    """
    if object_list is NOT_GIVEN and data is NOT_GIVEN:
        data, obj = either("data", data, "obj", obj), NOT_GIVEN
    is_filling = object_list is not NOT_GIVEN and obj is not NOT_GIVEN
    data = either("data", data, "object_list", object_list)
    if not is_filling and _is_short(data, obj, group):
        comm = resolve(group if obj is NOT_GIVEN else obj)
        check_call("all_gather_object", comm)
        return all_gather_packed(data, comm)
    comm = resolve(group)
    check_call("all_gather_object", comm)
    data[:] = all_gather_packed(obj, comm, partial(_require_places, "object_list", data, comm))
    return None


@overload
def gather_object(data: T = ..., dst: int = ..., group: GroupLike = ..., *, obj: T = ...) -> list[T] | None: ...
@overload
def gather_object(
    data: T = ...,
    object_gather_list: list[Any] | None = ...,
    dst: int = ...,
    group: GroupLike = ...,
    *,
    obj: T = ...,
) -> list[T] | None: ...
def gather_object(  # type: ignore[misc]  # the overloads share places, not names
    data: Any = NOT_GIVEN,
    object_gather_list: Any = None,
    dst: Any = 0,
    group: GroupLike = None,
    *,
    obj: Any = NOT_GIVEN,
) -> list[Any] | None:
    """Give rank `dst` every rank's object, as ``gather_object(obj, dst) -> list`` or filling a list in second place.

    Args:
        data: this rank's object.
        object_gather_list: on `dst`, the list to fill, with one place for each rank; elsewhere None.
        dst: rank within the group.
        group: where; None is the default group.
        obj: `data` by its other published name.

    **Collective**: every rank of the group.

    **Returns**: on `dst` the objects in rank order (None where it filled a list); None elsewhere.

    **Raises**: as `all_gather_object`.

    **Cost**: 4 KiB from each rank to each, and what does not fit in it to `dst` alone.

    **Example (2 ranks)**::

        >>> from lockstep.dist import gather_object, get_rank
        >>> gather_object("ab"[get_rank()]) == (["a", "b"] if get_rank() == 0 else None)
        True
    """
    if isinstance(object_gather_list, Integral):
        group = group if isinstance(dst, int) and dst == 0 else dst  # the short form has its group in third place
        object_gather_list, dst = None, object_gather_list
    data = either("data", data, "obj", obj)
    comm = resolve(group)
    dst = require_rank("dst", dst, comm)
    check_call("gather_object", comm, dst)
    is_filling = object_gather_list is not None and comm.rank == dst
    check = partial(_require_places, "object_gather_list", object_gather_list, comm) if is_filling else None
    gathered = gather_packed(data, dst, comm, copy_own=True, check=check)
    if gathered is None:
        return None
    if is_filling:
        object_gather_list[:] = gathered
        return None
    return list(gathered)


def broadcast_object(obj: T, src: int = 0, group: GroupLike = None) -> T:
    """Return rank `src`'s object on every rank; what the others hand in is not looked at.

    **Collective**: every rank of the group.

    **Raises**: TypeError on `src` where its object can't be pickled, PeerError on the others; DistError on a rank that
    can't load what it received.

    **Example (2 ranks)**::

        >>> from lockstep.dist import broadcast_object, get_rank
        >>> broadcast_object({"seed": 7} if get_rank() == 0 else None)
        {'seed': 7}
    """
    comm = resolve(group)
    src = require_rank("src", src, comm)
    check_call("broadcast_object", comm, src)
    received: T = broadcast_packed(obj, src, comm)
    return received


def broadcast_object_list(
    data: list[Any] = NOT_GIVEN,
    src: int = 0,
    group: GroupLike = None,
    device: str | torch.device | None = None,
    *,
    object_list: list[Any] = NOT_GIVEN,
) -> None:
    """Replace the entries of every rank's list by those of rank `src`'s, in place.

    Args:
        data: the list.
        src: rank within the group.
        group: where; None is the default group.
        device: taken for the sake of older callers; the group knows where it talks.
        object_list: `data` by its other published name.

    **Collective**: every rank of the group, with lists of one length.

    **Raises**: as `broadcast_object`; ValueError on a rank whose list has another length than `src`'s, after all have
    received.

    **Example (2 ranks)**::

        >>> from lockstep.dist import broadcast_object_list, get_rank
        >>> data = ["a", {"b": 1}] if get_rank() == 0 else [None, None]
        >>> broadcast_object_list(data)
        >>> data
        ['a', {'b': 1}]
    """
    comm = resolve(group)
    data = either("data", data, "object_list", object_list)
    if not isinstance(data, list):
        raise TypeError(f"`data` must be a list, but is {type(data).__name__} ({comm.this_rank})")
    src = require_rank("src", src, comm)
    check_call("broadcast_object_list", comm, src)
    received = broadcast_packed(data, src, comm)
    if len(received) != len(data):
        raise ValueError(
            f"`data` must have {len(received)} entries, as on rank {src}, but has {len(data)} ({comm.this_rank})"
        )
    data[:] = received


def scatter_object_list(
    scatter_object_output_list: list[Any],
    scatter_object_input_list: list[Any] | None = None,
    src: int = 0,
    group: GroupLike = None,
) -> None:
    """Put the i-th entry of rank `src`'s list into the first place of rank i's output list.

    **Collective**: every rank of the group; only `src` hands in an input list.

    **Raises**: ValueError on `src` where its list has not one entry for each rank, TypeError where one can't be
    pickled, PeerError on the others; DistError on a rank that can't load what it received.

    **Example (2 ranks)**::

        >>> from lockstep.dist import get_rank, scatter_object_list
        >>> output = [None]
        >>> scatter_object_list(output, ["for 0", "for 1"] if get_rank() == 0 else None)
        >>> output == [f"for {get_rank()}"]
        True
    """
    comm = resolve(group)
    if not isinstance(scatter_object_output_list, list) or not scatter_object_output_list:
        raise ValueError(
            f"`scatter_object_output_list` must be a list with at least one place, but is "
            f"{scatter_object_output_list!r} ({comm.this_rank})"
        )
    src = require_rank("src", src, comm)
    check_call("scatter_object_list", comm, src)
    check = partial(_require_places, "scatter_object_input_list", scatter_object_input_list, comm)
    scatter_object_output_list[0] = scatter_packed(scatter_object_input_list or (), src, comm, check)


def run_on_main(func: Callable[[], T], group: GroupLike = None) -> T:
    """Run `func` on rank 0 alone, and return its result on every rank.

    For what one rank does for all: looking for a file, making a folder, asking a server.

    Args:
        func: called on rank 0 only. It must hold no collective of the group, and return something that can be pickled.
        group: where; None is the default group.

    **Collective**: every rank of the group. The others wait at most for the group's timeout.

    **Returns**: on rank 0 the object itself, elsewhere a copy of it.

    **Raises**: on rank 0 what `func` raises, or TypeError where its result can't be pickled; on the others PeerError,
    naming that error.

    **Cost**: 4 KiB to each rank, and what of the pickled result does not fit in it.

    **Example (2 ranks)**::

        >>> from lockstep.dist import get_rank, run_on_main
        >>> run_on_main(lambda: f"found by rank {get_rank()}")
        'found by rank 0'
    """
    comm = resolve(group)
    if not callable(func):
        raise TypeError(
            f"`func` must be callable, but is {func!r} ({comm.this_rank}). Pass the function, without calling it"
        )
    check_call("run_on_main", comm)
    if comm.rank != 0:
        received: T = broadcast_packed(None, 0, comm)
        return received
    try:
        result = func()
    except BaseException as error:
        broadcast_header(encode_failure(error, OBJECT_HEADER_BYTES), 0, comm)
        raise
    broadcast_packed(result, 0, comm)
    return result


def _is_short(data: object, obj: object, group: GroupLike) -> bool:
    """Return whether a call has the form ``all_gather_object(obj, group)``."""
    return obj is NOT_GIVEN or _is_group(obj) or (obj is None and group is None and not _is_waiting(data))


def _is_group(obj: object) -> bool:
    # torch.distributed.new_group hands a number of its own, that very object, to processes that are not in the group.
    return isinstance(obj, ProcessGroup | DeviceMesh) or obj is GroupMember.NON_GROUP_MEMBER


def _is_waiting(data: object) -> bool:
    return isinstance(data, list) and 1 < len(data) == resolve().size and all(place is None for place in data)


def _require_places(name: str, places: object, comm: Comm) -> None:
    if not isinstance(places, list) or len(places) != comm.size:
        got = f"{len(places)} entries" if isinstance(places, list) else type(places).__name__
        raise ValueError(
            f"`{name}` must be a list of {comm.size} entries, one for each rank, but is {got} ({comm.this_rank})"
        )


@dataclass(frozen=True, slots=True)
class _Packed:
    """An object ready to be sent.

    Attributes:
        header: what is sent first; holds the body where that fits.
        body: sizes of the segments, then the pickle.
        segments: the large data, on the device that moves them.
        num_tensors: see `Pickled`.
    """

    header: bytes
    body: bytes
    segments: list[Tensor]
    num_tensors: int

    @property
    def body_segments(self) -> list[Tensor]:
        """The body as a segment, where it does not fit into the header."""
        return [] if _fits(len(self.body)) else [torch.frombuffer(bytearray(self.body), dtype=torch.uint8)]

    def copied(self) -> Any:
        """Return what another rank would get: an equal object that shares no memory with the one packed."""
        pickled = memoryview(self.body)[8 * len(self.segments) :]
        return load(Pickled(pickled, [segment.clone() for segment in self.segments], self.num_tensors))


@dataclass(slots=True)
class _Incoming:
    """What is known of another rank's object while it arrives."""

    rank: int
    body: Tensor
    is_inline: bool
    num_segments: int
    num_tensors: int

    @classmethod
    def from_header(cls, rank: int, header: bytes, device: torch.device) -> _Incoming:
        """Read a rank's header; the body is in it, or memory for it is allocated."""
        _, nbytes, num_segments, num_tensors = _HEAD.unpack_from(header)
        if _fits(nbytes):
            body = torch.frombuffer(bytearray(header[_HEAD.size : _HEAD.size + nbytes]), dtype=torch.uint8)
        else:
            body = torch.empty(nbytes, dtype=torch.uint8, device=device)
        return cls(rank, body, _fits(nbytes), num_segments, num_tensors)

    @property
    def body_segments(self) -> list[Tensor]:
        """The segment to be filled with the body, where it is not inline."""
        return [] if self.is_inline else [self.body]

    def empty_segments(self, device: torch.device) -> list[Tensor]:
        """Return memory for the segments, whose sizes the body names."""
        body = memoryview(bytes_of(self.body.cpu()))
        sizes = struct.unpack_from(f"<{self.num_segments}q", body)
        return [torch.empty(size, dtype=torch.uint8, device=device) for size in sizes]

    def unpickle(self, segments: list[Tensor], comm: Comm) -> Any:
        """Return the object.

        **Raises**: DistError where it can't be loaded. All ranks have got everything by now, so that only this one
        is concerned.
        """
        pickled = memoryview(bytes_of(self.body.cpu()))[8 * self.num_segments :]
        try:
            return load(Pickled(pickled, segments, self.num_tensors))
        except Exception as error:  # objects are rebuilt by code of their own, which may raise anything
            raise DistError(
                f"the object of rank {self.rank} must be loadable here, but is not: {type(error).__name__}: {error} "
                f"({comm.this_rank}). Define its class in a module that every rank can import"
            ) from error


def _pack(obj: object, comm: Comm, on_graph: Callable[[], None] | None = None) -> _Packed:
    """Pickle an object; call `on_graph` where it holds tensors that require grad.

    **Raises**: TypeError where it can't be pickled.
    """
    pickled = dump(obj, comm)
    if on_graph is not None and pickled.in_graph:
        on_graph()
    segments = [segment.to(comm.bytes_device) for segment in pickled.segments]
    body = struct.pack(f"<{len(segments)}q", *(x.numel() for x in segments)) + pickled.body
    inline = body if _fits(len(body)) else b""
    header = (_HEAD.pack(0, len(body), len(segments), pickled.num_tensors) + inline).ljust(OBJECT_HEADER_BYTES, b"\0")
    return _Packed(header, body, segments, pickled.num_tensors)


def all_gather_packed(
    obj: object, comm: Comm, check: Callable[[], None] | None = None, on_graph: Callable[[], None] | None = None
) -> list[Any]:
    """Give every rank every rank's object, in rank order.

    Args:
        obj: this rank's.
        comm: the group.
        check: raises where this rank can't take part; that is told to all, as is an object that can't be pickled.
        on_graph: called where tensors in the object require grad.

    **Collective**: every rank.
    """
    outcome = _attempt(obj, comm, check, on_graph)
    headers = all_gather_header(_header_of(outcome), comm)
    packed = _required(outcome, headers, comm)
    incoming = [_Incoming.from_header(rank, header, comm.bytes_device) for rank, header in enumerate(headers)]
    transport = transport_of(comm)
    if not all(one.is_inline for one in incoming):
        own = _staged(packed.body_segments, comm)
        transport.all_gather_segments(own, [one.body_segments for one in incoming]).wait()
    segments = [one.empty_segments(comm.bytes_device) for one in incoming]
    if any(segments):
        transport.all_gather_segments(packed.segments, segments).wait()
    return [one.unpickle(own, comm) for one, own in zip(incoming, segments, strict=True)]


def gather_packed(
    obj: object, dst: int, comm: Comm, *, copy_own: bool, check: Callable[[], None] | None = None
) -> Iterator[Any] | None:
    """Give rank `dst` every rank's object, in rank order; None elsewhere.

    The headers go to every rank, so that all of them raise where one object can't be pickled; the objects only to
    `dst`, where each is loaded when it is asked for.

    Args:
        obj: this rank's.
        dst: rank within the group.
        comm: the group.
        copy_own: whether `dst` gets its own object as a copy, or as it is, and then unpickled.
        check: as for `all_gather_packed`.

    **Collective**: every rank.
    """
    keeps_own = comm.rank == dst and not copy_own
    outcome = _attempt(None if keeps_own else obj, comm, check)
    headers = all_gather_header(_header_of(outcome), comm)
    packed = _required(outcome, headers, comm)
    transport = transport_of(comm)
    if comm.rank != dst:
        transport.send(_staged(packed.body_segments, comm) + packed.segments, dst).wait()
        return None
    incoming = [
        _Incoming.from_header(rank, header, comm.bytes_device) for rank, header in enumerate(headers) if rank != dst
    ]
    wait_all([transport.receive(one.body_segments, one.rank) for one in incoming])
    segments = [one.empty_segments(comm.bytes_device) for one in incoming]
    wait_all([transport.receive(own, one.rank) for one, own in zip(incoming, segments, strict=True)])
    loads: list[Callable[[], Any]] = [
        partial(one.unpickle, own, comm) for one, own in zip(incoming, segments, strict=True)
    ]
    loads.insert(dst, (lambda: obj) if keeps_own else packed.copied)
    return (load_one() for load_one in loads)


def broadcast_packed(obj: object, src: int, comm: Comm, on_graph: Callable[[], None] | None = None) -> Any:
    """Give every rank `src`'s object; `src` gets its own back as it is. `on_graph`: as for `all_gather_packed`.

    **Collective**: every rank.
    """
    transport = transport_of(comm)
    if comm.rank == src:
        outcome = _attempt(obj, comm, on_graph=on_graph)
        broadcast_header(_header_of(outcome), src, comm)
        packed = _required(outcome, [], comm)
        transport.broadcast(_staged(packed.body_segments, comm) + packed.segments, src).wait()
        return obj
    header = broadcast_header(_EMPTY, src, comm)
    require_no_failure([decode_failure(header)], comm, ranks=[src])
    incoming = _Incoming.from_header(src, header, comm.bytes_device)
    transport.broadcast(incoming.body_segments, src).wait()
    segments = incoming.empty_segments(comm.bytes_device)
    transport.broadcast(segments, src).wait()
    return incoming.unpickle(segments, comm)


def scatter_packed(objects: Sequence[object], src: int, comm: Comm, check: Callable[[], None] | None = None) -> Any:
    """Give rank i the i-th of `src`'s objects; `src` keeps its own as it is. `check`: as for `all_gather_packed`.

    **Collective**: every rank.
    """
    transport = transport_of(comm)
    if comm.rank != src:
        header = scatter_header(None, OBJECT_HEADER_BYTES, src, comm)
        require_no_failure([decode_failure(header)], comm, ranks=[src])
        incoming = _Incoming.from_header(src, header, comm.bytes_device)
        transport.receive(incoming.body_segments, src).wait()
        segments = incoming.empty_segments(comm.bytes_device)
        transport.receive(segments, src).wait()
        return incoming.unpickle(segments, comm)
    try:
        if check is not None:
            check()
        packed_objects = [_pack(None if rank == src else obj, comm) for rank, obj in enumerate(objects)]
    except Exception as error:
        scatter_header([encode_failure(error, OBJECT_HEADER_BYTES)] * comm.size, OBJECT_HEADER_BYTES, src, comm)
        raise
    scatter_header([packed.header for packed in packed_objects], OBJECT_HEADER_BYTES, src, comm)
    wait_all(
        [
            transport.send(_staged(packed.body_segments, comm) + packed.segments, rank)
            for rank, packed in enumerate(packed_objects)
            if rank != src
        ]
    )
    return objects[src]


def _attempt(
    obj: object, comm: Comm, check: Callable[[], None] | None = None, on_graph: Callable[[], None] | None = None
) -> _Packed | Exception:
    """Return the packed object, or what kept this rank from packing it; the others are told before it is raised."""
    try:
        if check is not None:
            check()
        return _pack(obj, comm, on_graph)
    except Exception as error:
        return error


def _header_of(outcome: _Packed | Exception) -> bytes:
    return outcome.header if isinstance(outcome, _Packed) else encode_failure(outcome, OBJECT_HEADER_BYTES)


def _required(outcome: _Packed | Exception, headers: Sequence[bytes], comm: Comm) -> _Packed:
    """Return what this rank packed, if no rank failed."""
    if not isinstance(outcome, _Packed):
        raise outcome
    require_no_failure([decode_failure(header) for header in headers], comm)
    return outcome


def _staged(segments: Sequence[Tensor], comm: Comm) -> list[Tensor]:
    return [segment.to(comm.bytes_device) for segment in segments]


def _fits(nbytes: int) -> bool:
    return _HEAD.size + nbytes <= OBJECT_HEADER_BYTES
