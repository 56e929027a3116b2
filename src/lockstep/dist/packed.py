"""Objects on their way between ranks. Large tensors and arrays inside them travel out of band, without a pickled copy.

A rank whose object can't be pickled says so in the exchange that comes first, so that all ranks raise together and the
group stays usable.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import Work

from lockstep.dist.pickling import Pickled, dump, load
from lockstep.errors import DistError, error_in_words
from lockstep.groups import Comm
from lockstep.transport.control import exchange, give_to_all, report_failure, start_receiving, start_sending
from lockstep.transport.handles import Handle
from lockstep.transport.memory import bytes_of

_HEAD = struct.Struct("<3q")  # bytes of the pickle, number of segments, of tensors
_CPU = torch.device("cpu")


class _Packed(NamedTuple):
    """An object ready to be sent, or known to arrive.

    Attributes:
        body: the pickle; when it arrives by itself, empty.
        body_bytes: its size.
        segments: the large tensors and arrays, flat bytes on the CPU.
        num_tensors: how many of them, from the front, are tensors.
    """

    body: bytes | memoryview
    body_bytes: int
    segments: list[Tensor]
    num_tensors: int

    def head(self) -> bytes:
        """Return the sizes, by which `_arriving` knows what follows."""
        sizes = struct.pack(f"<{len(self.segments)}q", *(x.numel() for x in self.segments))
        return _HEAD.pack(self.body_bytes, len(self.segments), self.num_tensors) + sizes

    def whole(self) -> list[Tensor]:
        """Return the pickle and the segments as tensors."""
        body = torch.frombuffer(bytearray(self.body), dtype=torch.uint8)
        return [body, *self.segments]


def _pack(obj: object, comm: Comm, on_graph: Callable[[], None] | None = None) -> _Packed:
    """Pickle an object; call `on_graph` if it holds tensors that require grad.

    **Raises**: TypeError if it can't be pickled.
    """
    pickled = dump(obj, comm)
    if on_graph is not None and pickled.in_graph:
        on_graph()
    segments = [segment.to(_CPU) for segment in pickled.segments]
    return _Packed(pickled.body, len(pickled.body), segments, pickled.num_tensors)


def _arriving(said: bytes) -> _Packed:
    """Return what a rank is about to send, with memory for its segments; `said` begins with `head`."""
    body_bytes, num_segments, num_tensors = _HEAD.unpack_from(said)
    sizes = struct.unpack_from(f"<{num_segments}q", said, _HEAD.size)
    segments = [torch.empty(size, dtype=torch.uint8, device=_CPU) for size in sizes]
    body = memoryview(said)[_HEAD.size + 8 * num_segments :]
    return _Packed(body, body_bytes, segments, num_tensors)


def _load(packed: _Packed, rank: int, comm: Comm) -> Any:
    """Return the object that rank `rank` has sent.

    **Raises**: DistError if it can't be loaded. All ranks have received everything by now, so only this one is
    affected.
    """
    try:
        return load(Pickled(packed.body, packed.segments, packed.num_tensors))
    except Exception as error:  # an object may be rebuilt by its own code, which may raise anything
        raise DistError(
            f"the object of rank {rank} must be loadable here, but is not: {error_in_words(error)} "
            f"({comm.this_rank}). Define its class in a module that every rank can import"
        ) from error


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
    with report_failure(comm):
        if check is not None:
            check()
        packed = _pack(obj, comm, on_graph)
    said = exchange(comm, packed.head() + packed.body)
    incoming = [_arriving(one) for one in said]
    # A copy of this rank's own, too.
    for own, sent in zip(incoming[comm.rank].segments, packed.segments, strict=True):
        own.copy_(sent)
    give_to_all([one.segments for one in incoming], comm)
    return [_load(one, rank, comm) for rank, one in enumerate(incoming)]


def gather_packed(
    obj: object, dst: int, comm: Comm, *, copy_own: bool, check: Callable[[], None] | None = None
) -> Iterator[Any] | None:
    """Give rank `dst` every rank's object, in rank order; None elsewhere.

    All ranks learn the sizes, so that all raise if one object can't be pickled. The objects go only to `dst`, where
    each is loaded when the iterator reaches it.

    Args:
        obj: this rank's object.
        dst: rank within the group.
        comm: the group.
        copy_own: whether `dst` gets a copy of its own object; if not, it gets the object itself, which is not pickled.
        check: as for `all_gather_packed`.

    **Collective**: every rank.
    """
    if comm.is_alone and comm.size > 1:  # the ranks of a fake group
        return iter([obj] * comm.size) if comm.rank == dst else None
    keeps_own = comm.rank == dst and not copy_own
    with report_failure(comm):
        if check is not None:
            check()
        packed = _pack(None if keeps_own else obj, comm)
    said = exchange(comm, packed.head())
    if comm.rank != dst:
        Handle(start_sending(packed.whole(), dst, comm), comm).wait()
        return None
    incoming = [packed if rank == dst else _arriving(one) for rank, one in enumerate(said)]
    works: list[Work | None] = []
    for rank, one in enumerate(incoming):
        if rank != dst:
            body = torch.empty(one.body_bytes, dtype=torch.uint8, device=_CPU)
            works += start_receiving([body, *one.segments], rank, comm)
            incoming[rank] = one._replace(body=memoryview(bytes_of(body)))
    Handle(works, comm).wait()
    if copy_own:
        incoming[dst] = packed._replace(segments=[segment.clone() for segment in packed.segments])
    return (obj if keeps_own and rank == dst else _load(one, rank, comm) for rank, one in enumerate(incoming))


def broadcast_packed(
    obj: object,
    src: int,
    comm: Comm,
    on_graph: Callable[[], None] | None = None,
    make: Callable[[], object] | None = None,
) -> Any:
    """Give every rank `src`'s object; `src` gets back the object itself.

    Args:
        obj: this rank's object; only that of `src` counts.
        src: rank within the group.
        comm: the group.
        on_graph: as for `all_gather_packed`.
        make: on `src`, returns the object, in place of `obj`; any error of its goes to all ranks.

    **Collective**: every rank.
    """
    if comm.rank == src or comm.is_alone:
        with report_failure(comm, Exception if make is None else BaseException):
            obj = obj if make is None else make()
            packed = _pack(obj, comm, on_graph)
        exchange(comm, packed.head() + packed.body)
        _from_one(packed.segments, src, comm)
        return obj
    packed = _arriving(exchange(comm)[src])
    _from_one(packed.segments, src, comm)
    return _load(packed, src, comm)


def _from_one(segments: Sequence[Tensor], src: int, comm: Comm) -> None:
    if segments:
        give_to_all([segments if rank == src else [] for rank in range(comm.size)], comm)


def scatter_packed(objects: Sequence[object], src: int, comm: Comm, check: Callable[[], None]) -> Any:
    """Give rank i the i-th of `src`'s objects; `src` gets its own object itself. `check`: as for `all_gather_packed`.

    **Collective**: every rank.
    """
    if comm.rank != src:
        sizes = struct.unpack(f"<{comm.size}q", exchange(comm)[src])
        said = torch.empty(sizes[comm.rank], dtype=torch.uint8, device=_CPU)
        Handle(start_receiving([said], src, comm), comm).wait()
        packed = _arriving(bytes(bytes_of(said)))
        Handle(start_receiving(packed.segments, src, comm), comm).wait()
        return _load(packed, src, comm)
    with report_failure(comm):
        check()
        every = [_pack(None if rank == src else obj, comm) for rank, obj in enumerate(objects)]
    first = [torch.frombuffer(bytearray(one.head() + one.body), dtype=torch.uint8) for one in every]
    exchange(comm, struct.pack(f"<{comm.size}q", *(x.numel() for x in first)))
    works: list[Work | None] = []
    for rank, one in enumerate(every):
        if rank != src:
            works += start_sending([first[rank], *one.segments], rank, comm)
    Handle(works, comm).wait()
    return objects[src]
