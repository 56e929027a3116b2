"""Small messages of one fixed size: what every collective with free shapes sends first.

A slot holds a header and, where the data are small, the data themselves, so that a 4-byte all_gather stays one message.
On the CPU they go from rank to rank, elsewhere by one collective of the backend.
"""

from __future__ import annotations

import ctypes
from functools import cache
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.distributed import (
    BroadcastOptions,
    GatherOptions,
    ProcessGroup,
    ScatterOptions,
    Work,
)

from lockstep.dist.groups import Group
from lockstep.dist.handles import translated, wait_for

# Sends and receives between two ranks match by tag, in order.
SLOT_TAG = 0x10C4

# Renamed in torch 2.13; remove the second name when 2.12 is no longer supported.
_ALL_GATHER_SINGLE = "all_gather_single" if hasattr(ProcessGroup, "all_gather_single") else "_allgather_base"


class Slots:
    """Slots of one size, one after the other in one piece of memory.

    Attributes:
        memory: their bytes.
        address: where the memory begins.
        slot_bytes: size of each.
        views: one for each slot.
    """

    __slots__ = ("address", "memory", "slot_bytes", "views")

    def __init__(self, number: int, slot_bytes: int) -> None:
        self.memory = bytearray(number * slot_bytes)
        self.address = ctypes.addressof((ctypes.c_char * len(self.memory)).from_buffer(self.memory))
        self.slot_bytes = slot_bytes
        self.views = [memoryview(self.memory)[k * slot_bytes : (k + 1) * slot_bytes] for k in range(number)]


class Room:
    """Memory for the slots of one group and size, used again by every call: `one` of this rank's and `each` rank's.

    Not only for the allocations: a tensor that Python has let go of is freed by the backend's thread, which has to wait
    for the interpreter then; that costs a small collective a third of its time (gloo, torch 2.13).
    """

    def __init__(self, slot_bytes: int, here: Group) -> None:
        self.one, self.each = Slots(1, slot_bytes), Slots(here.size, slot_bytes)
        self._on_cpu = [torch.frombuffer(x.memory, dtype=torch.uint8) for x in (self.one, self.each)]
        self.one_staged, self.each_staged = (x.to(here.comm_device) for x in self._on_cpu)
        self.each_parts = list(torch.split(self.each_staged, slot_bytes))
        self.of_others = {rank: part for rank, part in enumerate(self.each_parts) if rank != here.rank}
        self.own_to_others = dict.fromkeys(self.of_others, self.one_staged)
        self.in_flight: list[Work] = []
        self._own_place = slice(here.rank * slot_bytes, (here.rank + 1) * slot_bytes)
        self._is_staged = here.comm_device.type != "cpu"

    def keep_own(self) -> None:
        """Copy this rank's slot to its place among all ranks'."""
        self.each.memory[self._own_place] = self.one.memory

    def stage(self) -> None:
        """Take over, where the group talks, what was written into the memory here."""
        if self._is_staged:
            self.one_staged.copy_(self._on_cpu[0])
            self.each_staged.copy_(self._on_cpu[1])

    def fetch(self) -> None:
        """Take over into the memory here what arrived where the group talks."""
        if self._is_staged:
            self._on_cpu[0].copy_(self.one_staged)
            self._on_cpu[1].copy_(self.each_staged)


_rooms: WeakKeyDictionary[ProcessGroup, dict[int, Room]] = WeakKeyDictionary()


def room_for(slot_bytes: int, here: Group) -> Room:
    """Return the room for slots of this size; without a process group, a new one for one rank."""
    pg = here.pg
    if pg is None:
        return Room(slot_bytes, here)
    rooms = _rooms.get(pg)
    if rooms is None:
        rooms = _rooms[pg] = {}
    room = rooms.get(slot_bytes)
    if room is None:
        room = rooms[slot_bytes] = Room(slot_bytes, here)
    return room


def swap(room: Room, here: Group) -> None:
    """Give every rank every rank's slot: from `room.one` to `room.each`. **Collective**."""
    pg = here.pg
    if pg is None:
        room.each.memory[:] = room.one.memory
    elif here.in_pairs:
        room.keep_own()
        _talk(pg, here, room, room.of_others, room.own_to_others)
    else:
        room.stage()
        wait_for(getattr(pg, _ALL_GATHER_SINGLE)(room.each_staged, room.one_staged), here)
        room.fetch()


def collect(room: Room, dst: int, here: Group) -> None:
    """Give rank `dst` every rank's slot: from `room.one` to its `room.each`. **Collective**."""
    pg = here.pg
    if pg is None:
        room.each.memory[:] = room.one.memory
    elif here.in_pairs and here.rank == dst:
        room.keep_own()
        _talk(pg, here, room, room.of_others, {})
    elif here.in_pairs:
        _talk(pg, here, room, {}, {dst: room.one_staged})
    else:
        room.stage()
        landing = [room.each_parts] if here.rank == dst else []
        wait_for(pg.gather(landing, [room.one_staged], _gather_options(dst)), here)
        room.fetch()


def deal(room: Room, src: int, here: Group) -> None:
    """Give rank i the i-th slot of rank `src`: from its `room.each` to `room.one`. **Collective**."""
    pg = here.pg
    if pg is None:
        room.one.memory[:] = room.each.memory
    elif here.in_pairs and here.rank == src:
        room.one.memory[:] = room.each.views[src]
        _talk(pg, here, room, {}, room.of_others)
    elif here.in_pairs:
        _talk(pg, here, room, {src: room.one_staged}, {})
    else:
        room.stage()
        dealt = [room.each_parts] if here.rank == src else []
        wait_for(pg.scatter([room.one_staged], dealt, _scatter_options(src)), here)
        room.fetch()


def swap_slots(slot: bytes | bytearray, here: Group) -> list[memoryview]:
    """Give every rank every rank's slot, in rank order.

    The views that this and its sisters return are overwritten by the next call on the same group.

    **Collective**: every rank, with slots of one size.
    """
    room = room_for(len(slot), here)
    room.one.memory[:] = slot
    swap(room, here)
    return room.each.views


def deal_slots(slots: list[bytearray] | None, slot_bytes: int, src: int, here: Group) -> memoryview:
    """Give rank i the i-th of rank `src`'s slots.

    **Collective**: every rank; only `src` has slots.
    """
    room = room_for(slot_bytes, here)
    if slots is not None:
        room.each.memory[:] = b"".join(slots)
    deal(room, src, here)
    return room.one.views[0]


def spread_slot(slot: bytearray, src: int, here: Group) -> memoryview:
    """Give every rank `src`'s slot; the others hand in any of the same size.

    **Collective**: every rank, with slots of one size.
    """
    pg = here.pg
    if pg is None:
        return memoryview(slot)
    room = room_for(len(slot), here)
    room.one.memory[:] = slot
    room.stage()
    wait_for(pg.broadcast([room.one_staged], _broadcast_options(src)), here)
    room.fetch()
    return room.one.views[0]


def _talk(pg: ProcessGroup, here: Group, room: Room, arriving: dict[int, Tensor], leaving: dict[int, Tensor]) -> None:
    """Receive from some ranks and send to some, all at once.

    Where that fails with one, as it is gone, the others are served all the same, and left in flight: they may be
    waiting for it, and shall find out in their own time.
    """
    works = room.in_flight = []
    refusal = None
    for start, parts in ((pg.recv, arriving), (pg.send, leaving)):
        for rank, part in parts.items():
            try:
                works.append(start([part], rank, SLOT_TAG))
            except RuntimeError as error:
                refusal = error
    if refusal is not None:
        raise translated(refusal, here) from refusal
    for work in works:
        wait_for(work, here)
    room.in_flight = []


@cache
def _gather_options(dst: int) -> GatherOptions:
    options = GatherOptions()
    options.rootRank = dst
    return options


@cache
def _scatter_options(src: int) -> ScatterOptions:
    options = ScatterOptions()
    options.rootRank = src
    return options


@cache
def _broadcast_options(src: int) -> BroadcastOptions:
    options = BroadcastOptions()
    options.rootRank, options.asyncOp = src, False
    return options


def bytes_of(data: Tensor) -> ctypes.Array[ctypes.c_char]:
    """Return a writable buffer over a contiguous CPU tensor's memory, which it keeps alive."""
    buffer = (ctypes.c_char * (data.numel() * data.element_size())).from_address(data.data_ptr())
    buffer._owner = data  # type: ignore[attr-defined]  # the buffer borrows the tensor's memory
    return buffer
