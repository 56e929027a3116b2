"""Pickled objects on their way: a slot each, then what did not fit in it, then the large tensors and arrays.

A rank whose object can't be pickled says so in its slot, so that all ranks raise together and the group stays in step.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from lockstep.dist.groups import Group
from lockstep.dist.handles import wait_all
from lockstep.dist.packets import failure_in, pack_failure, require_no_failure
from lockstep.dist.pickling import Pickled, dump, load
from lockstep.dist.segments import broadcast_each, broadcast_from, receive_from, send_to
from lockstep.dist.slots import bytes_of, deal_slots, spread_slot, swap_slots
from lockstep.errors import DistError

SLOT_BYTES = 4096

T = TypeVar("T")

_HEAD = struct.Struct("<4q")  # status (0: well), bytes of the letter, number of segments, of which tensors'


@dataclass(frozen=True, slots=True)
class Parcel:
    """An object packed for the way.

    Attributes:
        slot: what goes first; holds the letter where that fits.
        letter: sizes of the segments, then the pickle.
        segments: the large data, on the device that moves them.
        num_tensors: see `Pickled`.
    """

    slot: bytearray
    letter: bytes
    segments: list[Tensor]
    num_tensors: int

    @property
    def follows(self) -> list[Tensor]:
        """The letter as a segment, where it does not fit into the slot."""
        return [] if _fits(len(self.letter)) else [torch.frombuffer(bytearray(self.letter), dtype=torch.uint8)]

    def reopened(self) -> Any:
        """Return what another rank would get: an equal object that shares no memory with the one packed."""
        body = memoryview(self.letter)[8 * len(self.segments) :]
        return load(Pickled(body, [segment.clone() for segment in self.segments], self.num_tensors))


@dataclass(slots=True)
class Arriving:
    """What is known of another rank's object while it arrives."""

    rank: int
    letter: Tensor
    is_inline: bool
    num_segments: int
    num_tensors: int

    @classmethod
    def from_slot(cls, rank: int, slot: memoryview, device: torch.device) -> Arriving:
        """Read a rank's slot; the letter is in it, or room is made for it."""
        _, nbytes, num_segments, num_tensors = _HEAD.unpack_from(slot)
        if _fits(nbytes):
            letter = torch.frombuffer(bytearray(slot[_HEAD.size : _HEAD.size + nbytes]), dtype=torch.uint8)
        else:
            letter = torch.empty(nbytes, dtype=torch.uint8, device=device)
        return cls(rank, letter, _fits(nbytes), num_segments, num_tensors)

    def landing(self) -> list[Tensor]:
        """Where the letter arrives, if it follows."""
        return [] if self.is_inline else [self.letter]

    def make_room(self, device: torch.device) -> list[Tensor]:
        """Return room for the segments, whose sizes the letter names."""
        letter = memoryview(bytes_of(self.letter.cpu()))
        sizes = struct.unpack_from(f"<{self.num_segments}q", letter)
        return [torch.empty(size, dtype=torch.uint8, device=device) for size in sizes]

    def opened(self, segments: list[Tensor], here: Group) -> Any:
        """Return the object.

        **Raises**: DistError where it can't be loaded. All ranks have got everything by now, so that only this one
        is concerned.
        """
        body = memoryview(bytes_of(self.letter.cpu()))[8 * self.num_segments :]
        try:
            return load(Pickled(body, segments, self.num_tensors))
        except Exception as error:  # objects are rebuilt by code of their own, which may raise anything
            raise DistError(
                f"the object of rank {self.rank} must be loadable here, but is not: {type(error).__name__}: {error} "
                f"({here.here}). Define its class in a module that every rank can import"
            ) from error


def pack(obj: object, here: Group, on_graph: Callable[[], None] | None = None) -> Parcel:
    """Pack an object; call `on_graph` where it holds tensors that require grad.

    **Raises**: TypeError where it can't be pickled.
    """
    pickled = dump(obj, here)
    if on_graph is not None and pickled.in_graph:
        on_graph()
    segments = [segment.to(here.bytes_device) for segment in pickled.segments]
    letter = struct.pack(f"<{len(segments)}q", *(x.numel() for x in segments)) + pickled.body
    slot = bytearray(SLOT_BYTES)
    _HEAD.pack_into(slot, 0, 0, len(letter), len(segments), pickled.num_tensors)
    if _fits(len(letter)):
        slot[_HEAD.size : _HEAD.size + len(letter)] = letter
    return Parcel(slot, letter, segments, pickled.num_tensors)


def swap_objects(
    obj: object, here: Group, check: Callable[[], None] | None = None, on_graph: Callable[[], None] | None = None
) -> list[Any]:
    """Give every rank every rank's object, in rank order.

    Args:
        obj: this rank's.
        here: the group.
        check: raises where this rank can't take part; that is told to all, as is an object that can't be pickled.
        on_graph: called where tensors in the object require grad.

    **Collective**: every rank.
    """
    outcome = _attempt(obj, here, check, on_graph)
    slots = swap_slots(_slot_of(outcome), here)
    parcel = _required(outcome, slots, here)
    arriving = [Arriving.from_slot(rank, slot, here.bytes_device) for rank, slot in enumerate(slots)]
    if not all(one.is_inline for one in arriving):
        broadcast_each(_staged(parcel.follows, here), [one.landing() for one in arriving], here).wait()
    rooms = [one.make_room(here.bytes_device) for one in arriving]
    broadcast_each(parcel.segments, rooms, here).wait()
    return [one.opened(room, here) for one, room in zip(arriving, rooms, strict=True)]


def collect_objects(
    obj: object, dst: int, here: Group, *, copy_own: bool, check: Callable[[], None] | None = None
) -> Iterator[Any] | None:
    """Give rank `dst` every rank's object, in rank order; None elsewhere.

    The slots go to every rank, so that all of them raise where one object can't be pickled; the objects only to `dst`,
    where each is loaded when it is asked for.

    Args:
        obj: this rank's.
        dst: rank within the group.
        here: the group.
        copy_own: whether `dst` gets its own object as a copy, or as it is, and then unpickled.
        check: as for `swap_objects`.

    **Collective**: every rank.
    """
    keeps_own = here.rank == dst and not copy_own
    outcome = _attempt(None if keeps_own else obj, here, check)
    slots = swap_slots(_slot_of(outcome), here)
    parcel = _required(outcome, slots, here)
    if here.rank != dst:
        send_to(_staged(parcel.follows, here) + parcel.segments, dst, here).wait()
        return None
    arriving = [Arriving.from_slot(rank, slot, here.bytes_device) for rank, slot in enumerate(slots) if rank != dst]
    wait_all([receive_from(one.landing(), one.rank, here) for one in arriving])
    rooms = [one.make_room(here.bytes_device) for one in arriving]
    wait_all([receive_from(room, one.rank, here) for one, room in zip(arriving, rooms, strict=True)])
    loads: list[Callable[[], Any]] = [
        partial(one.opened, room, here) for one, room in zip(arriving, rooms, strict=True)
    ]
    loads.insert(dst, (lambda: obj) if keeps_own else parcel.reopened)
    return (load_one() for load_one in loads)


def spread_object(obj: object, src: int, here: Group, on_graph: Callable[[], None] | None = None) -> Any:
    """Give every rank `src`'s object; `src` gets its own back as it is. `on_graph`: as for `swap_objects`.

    **Collective**: every rank.
    """
    if here.rank == src:
        outcome = _attempt(obj, here, on_graph=on_graph)
        spread_slot(_slot_of(outcome), src, here)
        parcel = _required(outcome, [], here)
        broadcast_from(_staged(parcel.follows, here) + parcel.segments, src, here).wait()
        return obj
    slot = spread_slot(bytearray(SLOT_BYTES), src, here)
    require_no_failure([failure_in(slot)], here, ranks=[src])
    arriving = Arriving.from_slot(src, slot, here.bytes_device)
    broadcast_from(arriving.landing(), src, here).wait()
    room = arriving.make_room(here.bytes_device)
    broadcast_from(room, src, here).wait()
    return arriving.opened(room, here)


def spread_outcome(func: Callable[[], T], src: int, here: Group) -> T:
    """Run `func` on `src`, and give every rank what it returns there; see `run_on_main`."""
    if here.rank != src:
        received: T = spread_object(None, src, here)
        return received
    try:
        result = func()
    except BaseException as error:
        spread_slot(pack_failure(error, SLOT_BYTES), src, here)
        raise
    received = spread_object(result, src, here)
    return received


def deal_objects(objects: Sequence[object], src: int, here: Group, check: Callable[[], None] | None = None) -> Any:
    """Give rank i the i-th of `src`'s objects; `src` keeps its own as it is. `check`: as for `swap_objects`.

    **Collective**: every rank.
    """
    if here.rank != src:
        slot = deal_slots(None, SLOT_BYTES, src, here)
        require_no_failure([failure_in(slot)], here, ranks=[src])
        arriving = Arriving.from_slot(src, slot, here.bytes_device)
        receive_from(arriving.landing(), src, here).wait()
        room = arriving.make_room(here.bytes_device)
        receive_from(room, src, here).wait()
        return arriving.opened(room, here)
    try:
        if check is not None:
            check()
        parcels = [pack(None if rank == src else obj, here) for rank, obj in enumerate(objects)]
    except Exception as error:
        deal_slots([pack_failure(error, SLOT_BYTES)] * here.size, SLOT_BYTES, src, here)
        raise
    deal_slots([parcel.slot for parcel in parcels], SLOT_BYTES, src, here)
    wait_all(
        [
            send_to(_staged(parcel.follows, here) + parcel.segments, rank, here)
            for rank, parcel in enumerate(parcels)
            if rank != src
        ]
    )
    return objects[src]


def _attempt(
    obj: object, here: Group, check: Callable[[], None] | None = None, on_graph: Callable[[], None] | None = None
) -> Parcel | Exception:
    """Return the packed object, or what kept this rank from packing it; the others are told before it is raised."""
    try:
        if check is not None:
            check()
        return pack(obj, here, on_graph)
    except Exception as error:
        return error


def _slot_of(outcome: Parcel | Exception) -> bytearray:
    return outcome.slot if isinstance(outcome, Parcel) else pack_failure(outcome, SLOT_BYTES)


def _required(outcome: Parcel | Exception, slots: Sequence[memoryview], here: Group) -> Parcel:
    """Return this rank's parcel if no rank failed."""
    if not isinstance(outcome, Parcel):
        raise outcome
    require_no_failure([failure_in(slot) for slot in slots], here)
    return outcome


def _staged(segments: Sequence[Tensor], here: Group) -> list[Tensor]:
    return [segment.to(here.bytes_device) for segment in segments]


def _fits(nbytes: int) -> bool:
    return _HEAD.size + nbytes <= SLOT_BYTES
