"""Small messages of one fixed size: what every collective with free shapes sends first.

A slot holds a header and, where the data are small, the data themselves, so that a 4-byte all_gather stays one message.
Every movement is one call to the backend; CPU and accelerator groups alike.
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
)

from lockstep.dist.groups import Group
from lockstep.dist.handles import wait_for

# Renamed in torch 2.13; remove the second name when 2.12 is no longer supported.
_ALL_GATHER_SINGLE = "all_gather_single" if hasattr(ProcessGroup, "all_gather_single") else "_allgather_base"


class _Room:
    """Memory for the slots of one group and size, used again by every call.

    Not only for the allocations: a tensor that Python has let go of is freed by the backend's thread, which has to wait
    for the interpreter then; that costs a small collective a third of its time (gloo, torch 2.13).
    """

    def __init__(self, size: int, here: Group) -> None:
        self.one = bytearray(size)
        self.each = bytearray(size * here.size)
        self.each_views = [memoryview(self.each)[start : start + size] for start in range(0, len(self.each), size)]
        self._on_cpu = [torch.frombuffer(self.one, dtype=torch.uint8), torch.frombuffer(self.each, dtype=torch.uint8)]
        self.one_staged, self.each_staged = (x.to(here.comm_device) for x in self._on_cpu)
        self.each_parts = list(torch.split(self.each_staged, size))
        self._is_staged = here.comm_device.type != "cpu"

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


_rooms: WeakKeyDictionary[ProcessGroup, dict[int, _Room]] = WeakKeyDictionary()


def swap_slots(slot: bytearray, here: Group) -> list[memoryview]:
    """Give every rank every rank's slot, in rank order.

    The views that this and its sisters return are overwritten by the next call on the same group.

    **Collective**: every rank, with slots of one size.
    """
    pg = here.pg
    if pg is None:
        return [memoryview(slot)]
    room = _room(pg, len(slot), here)
    room.one[:] = slot
    room.stage()
    wait_for(getattr(pg, _ALL_GATHER_SINGLE)(room.each_staged, room.one_staged), here)
    room.fetch()
    return room.each_views


def collect_slots(slot: bytearray, dst: int, here: Group) -> list[memoryview] | None:
    """Give rank `dst` every rank's slot, in rank order; None elsewhere.

    **Collective**: every rank, with slots of one size.
    """
    pg = here.pg
    if pg is None:
        return [memoryview(slot)]
    room = _room(pg, len(slot), here)
    room.one[:] = slot
    room.stage()
    landing = [room.each_parts] if here.rank == dst else []
    wait_for(pg.gather(landing, [room.one_staged], _gather_options(dst)), here)
    room.fetch()
    return room.each_views if here.rank == dst else None


def deal_slots(slots: list[bytearray] | None, size: int, src: int, here: Group) -> memoryview:
    """Give rank i the i-th of rank `src`'s slots, each of `size` bytes.

    **Collective**: every rank; only `src` has slots.
    """
    pg = here.pg
    if pg is None:
        assert slots is not None
        return memoryview(slots[0])
    room = _room(pg, size, here)
    if slots is not None:
        room.each[:] = b"".join(slots)
        room.stage()
    dealt = [room.each_parts] if here.rank == src else []
    wait_for(pg.scatter([room.one_staged], dealt, _scatter_options(src)), here)
    room.fetch()
    return memoryview(room.one)


def spread_slot(slot: bytearray, src: int, here: Group) -> memoryview:
    """Give every rank `src`'s slot; the others hand in any of the same size.

    **Collective**: every rank, with slots of one size.
    """
    pg = here.pg
    if pg is None:
        return memoryview(slot)
    room = _room(pg, len(slot), here)
    room.one[:] = slot
    room.stage()
    wait_for(pg.broadcast([room.one_staged], _broadcast_options(src)), here)
    room.fetch()
    return memoryview(room.one)


def _room(pg: ProcessGroup, size: int, here: Group) -> _Room:
    rooms = _rooms.get(pg)
    if rooms is None:
        rooms = _rooms[pg] = {}
    room = rooms.get(size)
    if room is None:
        room = rooms[size] = _Room(size, here)
    return room


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
