"""Reductions of up to 4 MiB and broadcasts between two ranks, in one message whose tag holds the digest of the calls.

A rank that makes another call waits for a message with another tag, until the watch finds out why. So these need no
check, no thread and no answer. The sum of two numbers does not depend on their order, so the bits are those of gloo.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from lockstep.groups import Comm
from lockstep.transport.handles import Handle, InFlight
from lockstep.transport.memory import as_native
from lockstep.transport.reduce_ops import OpName, combine
from lockstep.transport.small import TAG_BITS
from lockstep.watch.failures import translate_error

# Of a reduction. With more, gloo's own, which sends and adds in pieces, is as fast or faster; a check costs it little.
MOST_BYTES = 2**22
_TAG = 0x10CE
_MOST_KEPT = 2  # pieces of memory of each size


class TwoRanks:
    """What the two ranks of a group on the CPU send each other, and the memory for it, which calls use again.

    Tensors are contiguous, and on the CPU. All methods are collective.

    Args:
        comm: the group.
        in_flight: where handles are kept.
    """

    def __init__(self, comm: Comm, in_flight: InFlight) -> None:
        self._comm, self._peer = comm, 1 - comm.rank
        self._in_flight = in_flight
        self._free: dict[int, list[Tensor]] = {}

    def reduce(self, pg: ProcessGroup, data: Tensor, dst: int | None, op: OpName) -> Handle:
        """Start to reduce a tensor, in place, into rank `dst`'s, or into both if that is None."""
        if dst == self._peer:
            return self._start(pg, None, data)
        memory = self._take(data.nbytes)
        received = memory[: data.nbytes].view(data.dtype).view(data.shape)

        def finish() -> None:
            combine(self._in_order(data, received), op, data)
            self._give_back(memory)

        return self._start(pg, received, data if dst is None else None, finish)

    def reduce_scatter(self, pg: ProcessGroup, output: Tensor, inputs: list[Tensor], op: OpName) -> Handle:
        """Start to reduce the i-th tensors of both ranks into rank i's output."""
        own = inputs[self._comm.rank]
        memory = self._take(own.nbytes)
        received = memory[: own.nbytes].view(own.dtype).view(own.shape)

        def finish() -> None:
            combine(self._in_order(own, received), op, received)
            output.copy_(received)
            self._give_back(memory)

        return self._start(pg, received, inputs[self._peer], finish)

    def broadcast(self, pg: ProcessGroup, data: Tensor, src: int) -> Handle:
        """Start to copy rank `src`'s tensor into the other's."""
        return self._start(pg, None, data) if self._comm.rank == src else self._start(pg, data, None)

    def _start(
        self, pg: ProcessGroup, received: Tensor | None, sent: Tensor | None, finish: Callable[[], None] | None = None
    ) -> Handle:
        calls = self._comm.calls
        tag = _TAG if calls is None else _TAG | (calls.digest & 0x7FFF) << TAG_BITS
        works: list[Work] = []
        try:
            if received is not None:
                works.append(pg.recv([as_native(received)], self._peer, tag))
            if sent is not None:
                works.append(pg.send([as_native(sent)], self._peer, tag))
        except RuntimeError as error:  # gloo refuses to send to a rank that it knows to be gone
            raise translate_error(error, self._comm) from error
        return self._in_flight.started(works, self._comm, finish)

    def _in_order(self, own: Tensor, received: Tensor) -> tuple[Tensor, Tensor]:
        return (own, received) if self._comm.rank == 0 else (received, own)

    def _take(self, nbytes: int) -> Tensor:
        size = 1 << max(nbytes - 1, 1).bit_length()
        free = self._free.get(size)
        if free:
            return free.pop()
        with torch.inference_mode(False):
            return torch.empty(size, dtype=torch.uint8, device="cpu")

    def _give_back(self, memory: Tensor) -> None:
        free = self._free.setdefault(memory.nbytes, [])
        if len(free) < _MOST_KEPT:
            free.append(memory)
