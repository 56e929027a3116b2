"""Reductions of up to 4 MiB on the CPU, and broadcasts between two ranks, in messages whose tags hold the digest.

A rank that makes another call waits for a message with another tag, until the watch finds out why. So these need no
check before they begin. Tensors are combined in the order of the ranks, so the bits are the same on all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from lockstep.errors import DistError
from lockstep.groups import Comm
from lockstep.transport.handles import Handle, InFlight, PairwiseHandle, wait_for
from lockstep.transport.memory import as_native, memmove
from lockstep.transport.reduce_ops import OpName, combine
from lockstep.transport.small import tag_of
from lockstep.watch.failures import translate_error
from lockstep.watch.watch import interrupt

# Of a reduction. With more, gloo's own, which sends and adds in pieces, is as fast or faster; a check costs it little
# (docs/decisions/0026-calls-that-do-not-match.md).
_MOST_BYTES = 2**22
_MOST_RANKS = 16  # with more, the messages become many and short; gloo's go to two neighbours
_TAG = 0x10CE
_PARTS_TAG = 0x10D1
_MOST_KEPT = 2  # pieces of memory of each size


class DirectMessages:
    """What the ranks of a group on the CPU send straight to each other, and the memory for it, which calls use again.

    Tensors are contiguous, and on the CPU. All methods but `suits` are collective.

    Args:
        comm: the group.
        in_flight: where handles are kept.
    """

    def __init__(self, comm: Comm, in_flight: InFlight) -> None:
        self.comm, self.in_flight = comm, in_flight
        # Each begins with its neighbour, so that not all send to one rank at once.
        self.others = [(comm.rank + step) % comm.size for step in range(1, comm.size)]
        self._free: dict[int, list[Tensor]] = {}
        self._reductions = 0

    def suits(self, nbytes: int) -> bool:
        """Return whether a reduction of so many bytes of each rank goes this way."""
        return 2 <= self.comm.size <= _MOST_RANKS and nbytes <= _MOST_BYTES

    def reduce(self, pg: ProcessGroup, data: Tensor, dst: int | None, op: OpName) -> Handle:
        """Start to reduce a tensor, in place, into rank `dst`'s, or into every rank's if that is None."""
        if self.comm.size == 2:
            return self._reduce_between_two(pg, data, dst, op)
        self._reductions += 1
        return _ReductionInParts(self, pg, data, dst, op, self._reductions)

    def reduce_scatter(self, pg: ProcessGroup, output: Tensor, inputs: Sequence[Tensor], op: OpName) -> Handle:
        """Start to reduce the i-th tensors of all ranks, all of one shape, into rank i's output."""
        own = inputs[self.comm.rank]
        memory, received = self.receive_like(own)

        def finish() -> None:
            total = self.combined(own, received, op)
            output.copy_(total.view(output.shape))
            self.give_back(memory)

        works = self.start(pg, received, {rank: inputs[rank] for rank in self.others}, self.tag())
        return self.in_flight.started(works, self.comm, finish)

    def broadcast(self, pg: ProcessGroup, data: Tensor, src: int) -> Handle:
        """Start to copy rank `src`'s tensor into the other's, between two ranks."""
        (peer,) = self.others
        is_src = self.comm.rank == src
        works = self.start(pg, {} if is_src else {peer: data}, {peer: data} if is_src else {}, self.tag())
        return self.in_flight.started(works, self.comm)

    def _reduce_between_two(self, pg: ProcessGroup, data: Tensor, dst: int | None, op: OpName) -> Handle:
        """Exchange the whole tensors, which is one trip, where parts take two."""
        (peer,) = self.others
        sent = {} if dst == self.comm.rank else {peer: data}
        if dst == peer:
            return self.in_flight.started(self.start(pg, {}, sent, self.tag()), self.comm)
        memory, received = self.receive_like(data)

        def finish() -> None:
            parts = self.in_order(data, received)
            combine(parts, op, parts[self.comm.rank])
            self.give_back(memory)

        return self.in_flight.started(self.start(pg, received, sent, self.tag()), self.comm, finish)

    def tag(self) -> int:
        """Return the tag of messages that only a rank with the same calls meets."""
        calls = self.comm.calls
        return _TAG if calls is None else tag_of(_TAG, calls.digest)

    def start(self, pg: ProcessGroup, received: dict[int, Tensor], sent: dict[int, Tensor], tag: int) -> list[Work]:
        """Start to receive from some ranks and to send to some."""
        try:
            works = [pg.recv([as_native(part)], rank, tag) for rank, part in received.items()]
            return works + [pg.send([as_native(part)], rank, tag) for rank, part in sent.items()]
        except RuntimeError as error:  # gloo refuses to send to a rank that it knows to be gone
            raise translate_error(error, self.comm) from error

    def receive_like(self, own: Tensor) -> tuple[Tensor, dict[int, Tensor]]:
        """Return memory for a tensor like `own` of every other rank, and these tensors, flat."""
        nbytes = own.nbytes
        memory = self._take(nbytes * len(self.others))
        with torch.inference_mode(False):  # a thread may have to write there
            return memory, {
                rank: memory[place * nbytes : (place + 1) * nbytes].view(own.dtype)
                for place, rank in enumerate(self.others)
            }

    def in_order(self, own: Tensor, received: dict[int, Tensor]) -> list[Tensor]:
        """Return the tensors of all ranks, flat, in their order."""
        return [own.detach().view(-1) if rank == self.comm.rank else received[rank] for rank in range(self.comm.size)]

    def combined(self, own: Tensor, received: dict[int, Tensor], op: OpName) -> Tensor:
        """Combine the tensors of all ranks into the memory of a received one."""
        parts = self.in_order(own, received)
        total = parts[1] if self.comm.rank == 0 else parts[0]
        combine(parts, op, total)
        return total

    def give_back(self, memory: Tensor) -> None:
        """Let others use memory of `receive_like`."""
        free = self._free.setdefault(memory.nbytes, [])
        if len(free) < _MOST_KEPT:
            free.append(memory)

    def _take(self, nbytes: int) -> Tensor:
        size = 1 << max(nbytes - 1, 1).bit_length()
        free = self._free.get(size)
        if free:
            return free.pop()
        with torch.inference_mode(False):
            return torch.empty(size, dtype=torch.uint8, device="cpu")


class _ReductionInParts(PairwiseHandle):
    """A reduction over three ranks or more, in flight: each rank combines one part, and sends it to the others.

    That is two trips, where gloo's `all_reduce` sends around a ring. The others wait for this rank's second message, so
    it is complete before a user gets the handle (`leave_alone`).
    """

    __slots__ = ("_data", "_direct", "_dst", "_memory", "_number", "_op", "_parts", "_received", "_stage", "_works")

    def __init__(
        self, direct: DirectMessages, pg: ProcessGroup, data: Tensor, dst: int | None, op: OpName, number: int
    ) -> None:
        super().__init__((), direct.comm)
        self._direct, self._data, self._dst, self._op, self._number = direct, data, dst, op, number
        self._parts = torch.split(data.detach().view(-1), -(-data.numel() // direct.comm.size))
        self._memory, self._received = direct.receive_like(self._parts[direct.comm.rank])
        self._stage: Literal["receiving", "combining", "sending", "complete"] = "receiving"
        self._works: list[Work] = []
        direct.in_flight.keep(self)
        sent = {rank: self._parts[rank] for rank in direct.others}
        with self._interrupts():
            self._works = direct.start(pg, self._received, sent, direct.tag())

    def leave_alone(self) -> None:
        """Complete it now: a thread that waits until the interpreter ends would abort the process."""
        self.wait()

    def is_completed(self) -> bool:
        """Return whether `wait` would not block."""
        return self._stage == "complete"

    def _complete(self) -> bool:
        if self._stage == "complete":
            return True
        with self._interrupts():
            if self._stage == "combining":  # a second time, the parts would be added to their sum
                raise DistError(f"a reduction has failed or was interrupted before its end ({self._comm.this_rank})")
            wait_for(self._works, self._comm)
            if self._stage == "receiving":
                self._stage = "combining"
                total = self._direct.combined(self._parts[self._comm.rank], self._received, self._op)
                self._works = self._send_on(total)
                self._stage = "sending"
                wait_for(self._works, self._comm)
        self._stage = "complete"
        self._direct.give_back(self._memory)
        self._direct.in_flight.drop(self)
        return True

    @contextmanager
    def _interrupts(self) -> Iterator[None]:
        try:
            yield
        except DistError:
            interrupt(self._comm)  # the others wait for this rank
            raise

    def _send_on(self, total: Tensor) -> list[Work]:
        direct, dst, rank = self._direct, self._dst, self._comm.rank
        own, pg = self._parts[rank], self._comm.pg
        if pg is None:
            raise DistError(f"the group was destroyed while a reduction was in flight ({self._comm.this_rank})")
        tag = tag_of(_PARTS_TAG, self._number)
        keeps = dst in (None, rank)
        receivers = direct.others if dst is None else [other for other in direct.others if other == dst]
        received = {other: self._parts[other] for other in direct.others} if keeps else {}
        works = direct.start(pg, received, dict.fromkeys(receivers, total), tag)
        if keeps:
            memmove(own.data_ptr(), total.data_ptr(), own.nbytes)  # while the others are on their way
        return works
