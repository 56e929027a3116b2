"""Objects on their way between ranks. Large tensors and arrays inside them travel out of band, without a pickled copy.

Each rank sends a header, then the pickle if it did not fit into the header, then the large tensors and arrays. A rank
whose object can't be pickled says so in its header, so that all ranks raise together and the group stays usable.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lockstep.dist.header import (
    OBJECT_HEADER_BYTES,
    OBJECT_ROOM_BYTES,
    all_gather_header,
    broadcast_header,
    decode_failure,
    report_failure,
    require_no_failure,
    scatter_failure,
    scatter_header,
)
from lockstep.dist.pickling import Pickled, dump, load
from lockstep.errors import DistError, error_in_words
from lockstep.groups import Comm
from lockstep.transport.handles import Handle
from lockstep.transport.memory import bytes_of, copy_all
from lockstep.transport.pairs import transport_of

_HEAD = struct.Struct("<4q")  # status (0: no failure), bytes of the body, number of segments, of tensors
_EMPTY = bytes(OBJECT_HEADER_BYTES)


class _Packed(NamedTuple):
    """An object ready to be sent.

    Attributes:
        header: what is sent first; holds the body (sizes of the segments, then the pickle) if that fits.
        body_segments: the body as a segment, if it does not fit into the header.
        segments: the large tensors and arrays, on the device they are sent from.
    """

    header: bytes
    body_segments: list[Tensor]
    segments: list[Tensor]


class _Incoming:
    """What is known about a rank's object while it arrives.

    Attributes:
        rank: the rank that sent it.
        body_segments: the segment to fill with the body, if that is not in the header.
        segments: the segments to fill next; available once the body has arrived.
    """

    def __init__(self, rank: int, header: bytes, comm: Comm) -> None:
        _, nbytes, self._num_segments, self._num_tensors = _HEAD.unpack_from(header)
        self.rank, self._comm = rank, comm
        if _fits(nbytes):
            self._body = torch.frombuffer(bytearray(header[_HEAD.size : _HEAD.size + nbytes]), dtype=torch.uint8)
            self.body_segments = []
        else:
            self._body = torch.empty(nbytes, dtype=torch.uint8, device=comm.bytes_device)
            self.body_segments = [self._body]

    @cached_property
    def segments(self) -> list[Tensor]:
        sizes = struct.unpack_from(f"<{self._num_segments}q", bytes_of(self._body.cpu()))
        return [torch.empty(size, dtype=torch.uint8, device=self._comm.bytes_device) for size in sizes]

    def load(self) -> Any:
        """Return the object.

        **Raises**: DistError if it can't be loaded. All ranks have received everything by now, so only this one is
        affected.
        """
        pickled = memoryview(bytes_of(self._body.cpu()))[8 * self._num_segments :]
        try:
            return load(Pickled(pickled, self.segments, self._num_tensors))
        except Exception as error:  # an object may be rebuilt by its own code, which may raise anything
            raise DistError(
                f"the object of rank {self.rank} must be loadable here, but is not: {error_in_words(error)} "
                f"({self._comm.this_rank}). Define its class in a module that every rank can import"
            ) from error


def _pack(obj: object, comm: Comm, on_graph: Callable[[], None] | None = None) -> _Packed:
    """Pickle an object; call `on_graph` if it holds tensors that require grad.

    **Raises**: TypeError if it can't be pickled.
    """
    pickled = dump(obj, comm)
    if on_graph is not None and pickled.in_graph:
        on_graph()
    segments = [segment.to(comm.bytes_device) for segment in pickled.segments]
    body = struct.pack(f"<{len(segments)}q", *(x.numel() for x in segments)) + pickled.body
    head = _HEAD.pack(0, len(body), len(segments), pickled.num_tensors)
    if _fits(len(body)):
        return _Packed((head + body).ljust(OBJECT_HEADER_BYTES, b"\0"), [], segments)
    flat = torch.frombuffer(bytearray(body), dtype=torch.uint8).to(comm.bytes_device)
    return _Packed(head.ljust(OBJECT_HEADER_BYTES, b"\0"), [flat], segments)


def _exchange_headers(
    obj: object,
    comm: Comm,
    exchange: Callable[..., Sequence[bytes]],
    check: Callable[[], None] | None = None,
    on_graph: Callable[[], None] | None = None,
) -> tuple[_Packed, Sequence[bytes]]:
    """Return this rank's packed object and the headers of all ranks; if a rank can't send its object, all raise."""
    with report_failure(comm, exchange, OBJECT_HEADER_BYTES):
        if check is not None:
            check()
        packed = _pack(obj, comm, on_graph)
    headers = exchange(packed.header, comm=comm)
    require_no_failure([decode_failure(header) for header in headers], comm)
    return packed, headers


def _receive(src: int, header: bytes, comm: Comm, receive: Callable[[Sequence[Tensor], int], Handle]) -> Any:
    """Return the object that rank `src` sends to this rank; `receive` fills its segments."""
    require_no_failure([decode_failure(header)], comm, ranks=[src])
    incoming = _Incoming(src, header, comm)
    receive(incoming.body_segments, src).wait()
    receive(incoming.segments, src).wait()
    return incoming.load()


def all_gather_packed(
    obj: object, comm: Comm, check: Callable[[], None] | None = None, on_graph: Callable[[], None] | None = None
) -> list[Any]:
    """Give every rank every rank's object, in rank order.

    Args:
        obj: this rank's object.
        comm: the group.
        check: raises if this rank can't take part; all ranks learn of that, as of an object that can't be pickled.
        on_graph: called if tensors in the object require grad.

    **Collective**: every rank.
    """
    packed, headers = _exchange_headers(obj, comm, all_gather_header, check, on_graph)
    incoming = [_Incoming(rank, header, comm) for rank, header in enumerate(headers)]
    transport = transport_of(comm)
    if any(one.body_segments for one in incoming):
        transport.all_gather_segments(packed.body_segments, [one.body_segments for one in incoming]).wait()
    if any(one.segments for one in incoming):
        transport.all_gather_segments(packed.segments, [one.segments for one in incoming]).wait()
    return [one.load() for one in incoming]


def gather_packed(
    obj: object, dst: int, comm: Comm, *, copy_own: bool, check: Callable[[], None] | None = None
) -> Iterator[Any] | None:
    """Give rank `dst` every rank's object, in rank order; None elsewhere.

    The headers go to every rank, so that all ranks raise if one object can't be pickled. The objects go only to `dst`,
    where each is loaded when the iterator reaches it.

    Args:
        obj: this rank's object.
        dst: rank within the group.
        comm: the group.
        copy_own: whether `dst` gets a copy of its own object; if not, it gets the object itself, which is not pickled.
        check: as for `all_gather_packed`.

    **Collective**: every rank.
    """
    keeps_own = comm.rank == dst and not copy_own
    packed, headers = _exchange_headers(None if keeps_own else obj, comm, all_gather_header, check)
    transport = transport_of(comm)
    if comm.rank != dst:
        transport.send(packed.body_segments + packed.segments, dst).wait()
        return None
    incoming = [_Incoming(rank, header, comm) for rank, header in enumerate(headers)]
    others = [one for one in incoming if one.rank != dst]
    Handle([transport.receive(one.body_segments, one.rank) for one in others], comm).wait()
    Handle([transport.receive(one.segments, one.rank) for one in others], comm).wait()
    copy_all(incoming[dst].body_segments, packed.body_segments)
    copy_all(incoming[dst].segments, packed.segments)
    return (obj if keeps_own and one.rank == dst else one.load() for one in incoming)


class PendingGather:
    """The gathering of every rank's object to rank `dst`, in flight: the ranks go on meanwhile.

    On an accelerator, whose backend runs messages in order, it is complete when this has been made.

    Args:
        obj: this rank's object, which must not change until `wait` has returned.
        dst: rank within the group.
        comm: the group.

    **Collective**: every rank. Gatherings to one rank must be waited for in the order in which they were made.

    **Raises**: TypeError on a rank whose object can't be pickled; then `wait` raises PeerError on `dst`.
    """

    def __init__(self, obj: object, dst: int, comm: Comm) -> None:
        self._obj, self._comm = obj, comm
        self._gathered: list[Any] | None = None
        self._headers: dict[int, Tensor] = {}
        self._transport = transport_of(comm)
        self._pending = Handle((), comm)
        if not self._transport.has_beside:
            gathered = gather_packed(obj, dst, comm, copy_own=False)
            self._gathered = None if gathered is None else list(gathered)
        elif comm.rank == dst:
            self._gathered = [obj]  # of one rank, all
            self._headers = {
                rank: torch.empty(OBJECT_HEADER_BYTES, dtype=torch.uint8) for rank in range(comm.size) if rank != dst
            }
            if self._headers:
                self._pending = self._transport.beside(
                    "header", receiving=[(x, rank) for rank, x in self._headers.items()]
                )
        else:
            with report_failure(comm, partial(self._send, dst), OBJECT_HEADER_BYTES):
                packed = _pack(obj, comm)
            self._send(dst, packed.header, comm, packed.body_segments + packed.segments)

    def wait(self, timeout: timedelta | None = None) -> list[Any] | None:
        """Return on `dst` the objects in rank order, its own unchanged, and None elsewhere; there, this rank has sent.

        **Raises**: as the collectives on objects; CollectiveTimeoutError after `timeout`, by default the group's.
        """
        self._pending.wait(timeout)
        if self._headers:
            headers = {rank: bytes(bytes_of(header)) for rank, header in self._headers.items()}
            self._headers = {}
            failures = {rank: decode_failure(header) for rank, header in headers.items()}
            objects = [self._receive(rank, header) for rank, header in headers.items() if failures[rank] is None]
            require_no_failure(list(failures.values()), self._comm, ranks=list(failures))
            objects.insert(self._comm.rank, self._obj)
            self._gathered = objects
        return self._gathered

    def _send(self, dst: int, header: bytes, comm: Comm, segments: Sequence[Tensor] = ()) -> None:
        first = torch.frombuffer(bytearray(header), dtype=torch.uint8)
        handles = [self._transport.beside("header", sending=[(first, dst)])]
        if segments:
            handles.append(self._transport.beside("segment", sending=[(segment, dst) for segment in segments]))
        self._pending = Handle(handles, comm)

    def _receive(self, rank: int, header: bytes) -> Any:
        def receive(segments: Sequence[Tensor], src: int) -> Handle:
            return self._transport.beside("segment", receiving=[(segment, src) for segment in segments])

        return _receive(rank, header, self._comm, receive)


def broadcast_packed(obj: object, src: int, comm: Comm, on_graph: Callable[[], None] | None = None) -> Any:
    """Give every rank `src`'s object; `src` gets back the object itself. `on_graph`: as for `all_gather_packed`.

    **Collective**: every rank.
    """
    transport = transport_of(comm)
    if comm.rank != src:
        return _receive(src, broadcast_header(_EMPTY, src, comm), comm, transport.broadcast)
    packed, _ = _exchange_headers(
        obj, comm, lambda header, comm: [broadcast_header(header, src, comm)], on_graph=on_graph
    )
    transport.broadcast(packed.body_segments + packed.segments, src).wait()
    return obj


def scatter_packed(objects: Sequence[object], src: int, comm: Comm, check: Callable[[], None]) -> Any:
    """Give rank i the i-th of `src`'s objects; `src` gets its own object itself. `check`: as for `all_gather_packed`.

    **Collective**: every rank.
    """
    transport = transport_of(comm)
    if comm.rank != src:
        header = scatter_header(None, OBJECT_HEADER_BYTES, src, comm)
        return _receive(src, header, comm, transport.receive)

    with report_failure(comm, partial(scatter_failure, src=src), OBJECT_HEADER_BYTES):
        check()
        packed = [_pack(None if rank == src else obj, comm) for rank, obj in enumerate(objects)]
    scatter_header([one.header for one in packed], OBJECT_HEADER_BYTES, src, comm)
    others = [rank for rank in range(comm.size) if rank != src]
    sent = [transport.send(packed[rank].body_segments + packed[rank].segments, rank) for rank in others]
    Handle(sent, comm).wait()
    return objects[src]


def _fits(nbytes: int) -> bool:
    return _HEAD.size + nbytes <= OBJECT_ROOM_BYTES
