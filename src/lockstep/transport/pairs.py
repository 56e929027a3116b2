"""A transport from rank to rank, on the CPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from lockstep.device import copy_into
from lockstep.groups import SOLO, Comm
from lockstep.transport.backend import SEGMENT_TAG, Check, Kind, Meanwhile, Messages, Transport
from lockstep.transport.direct import DirectMessages
from lockstep.transport.handles import Handle, PairwiseHandle, wait_for
from lockstep.transport.memory import HeaderBuffers, as_native, copy_all, is_plain_memory
from lockstep.transport.reduce_ops import OpName
from lockstep.transport.small import ROOMS, SmallReduction, room_for, tag_of
from lockstep.watch.failures import translate_error

# gloo matches sends and receives between two ranks by tag, in order. Messages of different sizes have different tags,
# because gloo aborts the process where a message is longer than expected; `small` and `direct` have the next ones.
_HEADER_TAG = 0x10C4
_BESIDE_TAGS = {"header": 0x10CF, "segment": 0x10D0}


class PairwiseCpu(Transport):
    """A transport that sends directly from rank to rank, on the CPU.

    gloo's sends and receives need no thread switch and no copy: an all_gather of 1 KiB takes half as long as gloo's
    own, and one of 16 MiB a third (2 and 4 ranks, torch 2.13; docs/decisions/0008-pairs-on-the-cpu.md). On
    accelerators, which run messages in order, pairs of sends and receives could block each other.
    """

    has_beside = True

    def __init__(self, comm: Comm) -> None:
        super().__init__(comm)
        self._direct = DirectMessages(comm, self.small.in_flight)
        self._completed = Handle((), comm)

    def check_of_reduction(self, nbytes: int, dst: int | None) -> Check:
        """See `Transport`. gloo ends the process where a message is longer than expected.

        What is not sent in messages of lockstep's own is therefore compared before, whatever the mode.
        """
        room = room_for(nbytes, self.comm.size)
        if room == ROOMS[0] and dst is None:
            return "carried"
        if room is None and self._direct.suits(nbytes):
            return "tagged"
        # What goes to one rank goes one way: a rank that compares would not meet it.
        return "if due" if room is not None or self.comm.size == 1 else "before"

    def check_of_broadcast(self, nbytes: int) -> Check:
        """See `check_of_reduction`."""
        return "if due" if self.comm.size <= 2 or room_for(nbytes, self.comm.size) is not None else "before"

    def reduce(self, data: Tensor, dst: int | None, op: OpName, *, async_op: bool) -> Handle:
        """See `Transport`."""
        room = room_for(data.nbytes, self.comm.size)
        if room is None:
            if self._direct.suits(data.nbytes):
                return self._direct.reduce(self.pg, data, dst, op)
            return super().reduce(data, dst, op, async_op=async_op)
        if dst is not None:
            return self.small.reduce_to(self.pg, data, dst, op, room, async_op=async_op)
        if async_op:
            return SmallReduction(self.small, self.pg, data, op, room)
        self.small.reduce(self.pg, data, op, room)
        return Handle((), self.comm)

    def reduce_scatter(self, output: Tensor, inputs: list[Tensor], op: OpName, *, async_op: bool) -> Handle:
        """See `Transport`."""
        nbytes = len(inputs) * output.nbytes
        if room_for(nbytes, self.comm.size) is not None:
            joined = torch.stack(inputs)
            handle = self.reduce(joined, None, op, async_op=async_op)
            return Handle([handle], self.comm, lambda: copy_into(output, joined[self.comm.rank]))
        if self._direct.suits(nbytes):
            return self._direct.reduce_scatter(self.pg, output, inputs, op)
        return super().reduce_scatter(output, inputs, op, async_op=async_op)

    def broadcast_whole(self, data: Tensor, src: int, *, async_op: bool) -> Handle:
        """See `Transport`."""
        room = room_for(data.nbytes, self.comm.size)
        if room is not None:
            return self.small.broadcast(self.pg, data, src, room, async_op=async_op)
        if self.comm.size == 2:
            return self._direct.broadcast(self.pg, data, src)
        return super().broadcast_whole(data, src, async_op=async_op)

    def _all_gather_headers(self, buffers: HeaderBuffers, meanwhile: Meanwhile) -> None:
        buffers.copy_own()
        self._exchange_headers(buffers, buffers.of_others, buffers.own_to_others, meanwhile=meanwhile)

    def _gather_headers(self, buffers: HeaderBuffers, dst: int, following: Messages, meanwhile: Meanwhile) -> Handle:
        if self.comm.rank == dst:
            buffers.copy_own()
            return self._exchange_headers(buffers, buffers.of_others, {}, following, meanwhile=meanwhile)
        return self._exchange_headers(buffers, {}, {dst: buffers.own_staged}, following, meanwhile=meanwhile)

    def _scatter_headers(self, buffers: HeaderBuffers, src: int, following: Messages) -> Handle:
        if self.comm.rank == src:
            buffers.own.data[:] = buffers.every.views[src]
            return self._exchange_headers(buffers, {}, buffers.of_others, following)
        return self._exchange_headers(buffers, {src: buffers.own_staged}, {}, following)

    def all_gather_segments(self, own: Sequence[Tensor], received: Sequence[Sequence[Tensor]]) -> Handle:
        """See `Transport`."""
        copy_all(received[self.comm.rank], own)
        others = self._others()
        return self._send_and_receive(
            [(segment, rank) for rank in others for segment in received[rank]],
            [(segment, rank) for rank in others for segment in own],
        )

    def all_to_all(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Handle:
        """See `Transport`. Sends from the caller's own memory, and receives into it if nothing is sent from there."""
        comm = self.comm
        sent = {x.untyped_storage().data_ptr() for x in inputs}  # memory that must not change before it has left
        received = [
            x
            if x.is_cpu and is_plain_memory(x) and x.untyped_storage().data_ptr() not in sent
            else torch.empty(x.shape, dtype=x.dtype, device=comm.comm_device)
            for x in outputs
        ]
        others = self._others()
        works = self._start(
            [(as_native(received[rank].detach()), rank) for rank in others if received[rank].numel()],
            [(as_native(comm.to_comm_device(inputs[rank])), rank) for rank in others if inputs[rank].numel()],
            self._segment_tag(),
        )
        exchange = PairwiseHandle(works, comm)
        copy_into(received[comm.rank], inputs[comm.rank].detach())
        return Handle([exchange], comm, lambda: copy_all(outputs, received))

    def beside(self, kind: Kind, *, receiving: Messages = (), sending: Messages = ()) -> Handle:
        """See `Transport`. gloo tells messages apart by their tags."""
        return self.small.in_flight.started(self._start(receiving, sending, _BESIDE_TAGS[kind]), self.comm)

    def _segment_tag(self) -> int:
        # A message is met only by a rank that has made the same calls, even if no header has gone before it; others
        # wait, until the watch finds out why.
        calls = self.comm.calls
        return SEGMENT_TAG if calls is None else tag_of(SEGMENT_TAG, calls.digest)

    def _others(self) -> list[int]:
        return [rank for rank in range(self.comm.size) if rank != self.comm.rank]

    def _exchange_headers(
        self,
        buffers: HeaderBuffers,
        receiving: Mapping[int, Tensor],
        sending: Mapping[int, Tensor],
        following: Messages = (),
        *,
        meanwhile: Meanwhile = None,
    ) -> Handle:
        """Receive from some ranks and send to some, all at once, also what follows the headers.

        Returns a handle of what follows, which the others have to meet only after they have read the headers.

        If this fails for a rank that is gone, the messages of the other ranks are still started, and left in flight.
        They may themselves be waiting for that rank, and find out on their own.
        """
        pg = self.pg
        works: list[Work] = []
        buffers.in_flight = [works]
        refusal = None
        tag = tag_of(_HEADER_TAG, buffers.own.header_bytes)
        for start, parts in ((pg.recv, receiving), (pg.send, sending)):
            for rank, part in parts.items():
                try:
                    works.append(start([part], rank, tag))
                except RuntimeError as error:
                    refusal = error
        if refusal is not None:
            raise translate_error(refusal, self.comm) from refusal
        handle = self._send_and_receive([], following) if following else self._completed
        buffers.in_flight = [works, handle]
        if meanwhile is not None:
            meanwhile()
        wait_for(works, self.comm)
        buffers.in_flight = []
        return handle


class _Alone(PairwiseCpu):
    """The transport of one process without a group: what is sent is what arrives."""

    def buffers(self, header_bytes: int) -> HeaderBuffers:
        """Return new buffers, because threads may call concurrently: there is no order of messages to keep."""
        return HeaderBuffers(header_bytes, self.comm)

    def _broadcast_header(self, buffers: HeaderBuffers, src: int) -> None:
        pass

    def all_to_all(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Handle:
        """See `Transport`."""
        copy_into(outputs[0], inputs[0])
        return Handle((), self.comm)

    def broadcast(self, segments: Sequence[Tensor], src: int) -> Handle:
        """See `Transport`."""
        return Handle((), self.comm)

    def _send_and_receive(self, *nothing: object) -> Handle:
        return Handle((), self.comm)

    def _exchange_headers(self, *nothing: object, meanwhile: Meanwhile = None) -> Handle:
        if meanwhile is not None:
            meanwhile()
        return self._completed


_ALONE = _Alone(SOLO)
_transports: WeakKeyDictionary[ProcessGroup, Transport] = WeakKeyDictionary()


def transport_of(comm: Comm) -> Transport:
    """Return the transport of a group; it is chosen at the first call."""
    pg = comm.pg
    if pg is None:
        return _ALONE
    transport = _transports.get(pg)
    if transport is None:
        kind = PairwiseCpu if comm.comm_device.type == "cpu" else Transport
        transport = _transports[pg] = kind(comm)
    return transport
