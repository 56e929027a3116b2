"""Small messages of one fixed size: what every collective with free shapes sends first.

A slot holds a header and, where the data are small, the data themselves, so that a 4-byte all_gather stays one message.
Every movement is one call to the backend; CPU and accelerator groups alike.
"""

from __future__ import annotations

import ctypes

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
_all_gather_single = getattr(ProcessGroup, "all_gather_single", None) or ProcessGroup._allgather_base


def swap_slots(slot: bytearray, here: Group) -> list[memoryview]:
    """Give every rank every rank's slot, in rank order.

    **Collective**: every rank, with slots of one size.
    """
    if here.pg is None:
        return [memoryview(slot)]
    size = len(slot)
    received = bytearray(size * here.size)
    if here.comm_device.type == "cpu":
        work = _all_gather_single(here.pg, _tensor(received), _tensor(slot))
        wait_for(work, here)
    else:
        staged = torch.empty(len(received), dtype=torch.uint8, device=here.comm_device)
        wait_for(_all_gather_single(here.pg, staged, _tensor(slot).to(here.comm_device)), here)
        _tensor(received).copy_(staged)
    view = memoryview(received)
    return [view[rank * size : (rank + 1) * size] for rank in range(here.size)]


def collect_slots(slot: bytearray, dst: int, here: Group) -> list[memoryview] | None:
    """Give rank `dst` every rank's slot, in rank order; None elsewhere.

    **Collective**: every rank, with slots of one size.
    """
    if here.pg is None:
        return [memoryview(slot)]
    options = GatherOptions()
    options.rootRank = dst
    sent = _tensor(slot).to(here.comm_device)
    if here.rank != dst:
        wait_for(here.pg.gather([], [sent], options), here)
        return None
    parts = [torch.empty_like(sent) for _ in range(here.size)]
    wait_for(here.pg.gather([parts], [sent], options), here)
    return [_view(part) for part in parts]


def deal_slots(slots: list[bytearray] | None, size: int, src: int, here: Group) -> memoryview:
    """Give rank i the i-th of rank `src`'s slots, each of `size` bytes.

    **Collective**: every rank; only `src` has slots.
    """
    if here.pg is None:
        assert slots is not None
        return memoryview(slots[0])
    options = ScatterOptions()
    options.rootRank = src
    received = torch.empty(size, dtype=torch.uint8, device=here.comm_device)
    sent = [] if slots is None else [[_tensor(slot).to(here.comm_device) for slot in slots]]
    wait_for(here.pg.scatter([received], sent, options), here)
    return _view(received)


def spread_slot(slot: bytearray, src: int, here: Group) -> memoryview:
    """Give every rank `src`'s slot; the others hand in an empty one of the same size, which is overwritten.

    **Collective**: every rank, with slots of one size.
    """
    if here.pg is None:
        return memoryview(slot)
    options = BroadcastOptions()
    options.rootRank, options.asyncOp = src, False
    travelling = _tensor(slot).to(here.comm_device)
    wait_for(here.pg.broadcast([travelling], options), here)
    return _view(travelling)


def _tensor(slot: bytearray) -> Tensor:
    return torch.frombuffer(slot, dtype=torch.uint8)


def _view(data: Tensor) -> memoryview:
    """Return the bytes of a flat uint8 tensor, without numpy."""
    return memoryview(bytes_of(data.cpu())).cast("B")


def bytes_of(data: Tensor) -> ctypes.Array[ctypes.c_char]:
    """Return a writable buffer over a contiguous CPU tensor's memory, which it keeps alive."""
    buffer = (ctypes.c_char * (data.numel() * data.element_size())).from_address(data.data_ptr())
    buffer._owner = data  # type: ignore[attr-defined]  # the buffer borrows the tensor's memory
    return buffer
