"""A transport that uses the collectives of the backend, on any device."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, ClassVar, Literal, TypeAlias

import torch
from torch import Tensor
from torch.distributed import (
    AllreduceOptions,
    BroadcastOptions,
    GatherOptions,
    ProcessGroup,
    ReduceOp,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
    Work,
)

from lockstep.device import copy_into
from lockstep.groups import Comm
from lockstep.transport.handles import Handle, PairwiseHandle, wait_for
from lockstep.transport.memory import HeaderBuffers, HeaderMemory, as_native, copy_all
from lockstep.transport.reduce_ops import TORCH_OPS, OpName
from lockstep.transport.small import SmallMessages
from lockstep.watch.failures import mismatch, translate_error

SEGMENT_TAG = 0x10C5  # `small` has more

# Renamed in torch 2.13; remove the second name when 2.12 is no longer supported.
_ALL_GATHER_SINGLE = "all_gather_single" if hasattr(ProcessGroup, "all_gather_single") else "_allgather_base"

_KEPT_BYTES = 2**16

# When a call is compared with those of the other ranks: its messages do it, which are those of a comparison; their tags
# do it, which ranks with other calls don't meet, so a sample has nothing to find; only if the mode says so; always,
# before it begins.
Check: TypeAlias = Literal["carried", "tagged", "if due", "before"]

Messages: TypeAlias = Sequence[tuple[Tensor, int]]
"""Contiguous tensors, each with the rank from which it comes, or to which it goes."""
Kind: TypeAlias = Literal["header", "segment"]
Meanwhile: TypeAlias = Callable[[], None] | None
"""What to do while messages are on their way."""


class Transport:
    """Carries headers and segments within one group, by the collectives of its backend, on any device.

    Methods for headers take `HeaderBuffers`, and send from and receive into `own` and `every`. Segments are contiguous
    tensors on the group's device. All methods but `send`, `receive` and `beside` are collective.
    """

    has_beside: ClassVar[bool] = False
    """Whether messages may be sent beside others, without regard to their order; see `PairwiseCpu.beside`."""

    def __init__(self, comm: Comm) -> None:
        self.comm = comm
        self._buffers: dict[int, HeaderBuffers] = {}
        self._kept: deque[Tensor] = deque(maxlen=8)
        self.small = SmallMessages(comm)

    @property
    def pg(self) -> ProcessGroup:
        """Torch's process group."""
        pg = self.comm.pg
        assert pg is not None  # the owner of a transport keeps its group alive
        return pg

    def buffers(self, header_bytes: int) -> HeaderBuffers:
        """Return the buffers for headers of this size; all calls in the group share them."""
        buffers = self._buffers.get(header_bytes)
        if buffers is None:
            buffers = self._buffers[header_bytes] = HeaderBuffers(header_bytes, self.comm)
        return buffers

    def keep_alive(self, sent: Tensor) -> None:
        """Keep a small tensor that nothing else refers to, until the backend's thread has released it.

        Otherwise that thread frees the tensor, for which it needs the GIL. The next call waits for that, ten times as
        long as the call itself takes (gloo, torch 2.13).
        """
        if sent.nbytes <= _KEPT_BYTES:
            self._kept.append(sent)

    def all_gather_headers(self, buffers: HeaderBuffers, meanwhile: Meanwhile = None) -> None:
        """Give every rank every rank's header: from `own` to `every`.

        This and the other methods for headers raise CollectiveMismatchError where the ranks have made different calls.
        """
        digest = self._stamp(buffers.own)
        self._all_gather_headers(buffers, meanwhile)
        self._require_same_calls(buffers.every, digest)

    def gather_headers(
        self, buffers: HeaderBuffers, dst: int, following: Messages = (), meanwhile: Meanwhile = None
    ) -> Handle:
        """Give rank `dst` every rank's header: from `own` to its `every`.

        Returns a handle of what this rank sends after it, which `dst` receives with `receive`.
        """
        digest = self._stamp(buffers.own)
        sent = self._gather_headers(buffers, dst, following, meanwhile)
        if self.comm.rank == dst:
            self._require_same_calls(buffers.every, digest)
        return sent

    def scatter_headers(self, buffers: HeaderBuffers, src: int, following: Messages = ()) -> Handle:
        """Give rank i the i-th header of rank `src`: from its `every` to `own`.

        Returns a handle of what `src` sends after them, which the others receive with `receive`.
        """
        digest = self._stamp(buffers.every if self.comm.rank == src else buffers.own)
        sent = self._scatter_headers(buffers, src, following)
        self._require_same_calls(buffers.own, digest)
        return sent

    def broadcast_header(self, buffers: HeaderBuffers, src: int) -> None:
        """Give every rank `src`'s header: from its `own` to every `own`."""
        digest = self._stamp(buffers.own)
        self._broadcast_header(buffers, src)
        self._require_same_calls(buffers.own, digest)

    def have_same_calls(self) -> bool:
        """Return whether all ranks have made the same calls; all get the same answer. **Collective**: every rank."""
        if "cpu" in self.comm.devices:
            return self.small.compare(self.pg)
        digest = 0 if self.comm.calls is None else self.comm.calls.digest
        digests = torch.tensor([digest, ~digest], device=self.comm.comm_device)
        wait_for([self.pg.allreduce([digests], _options(AllreduceOptions, reduceOp=ReduceOp.MAX))], self.comm)
        highest, lowest = digests.tolist()
        return bool(highest == ~lowest)

    def _stamp(self, memory: HeaderMemory) -> int:
        calls = self.comm.calls
        if calls is None:
            return 0
        memory.stamp(calls.digest)
        return calls.digest

    def _require_same_calls(self, memory: HeaderMemory, digest: int) -> None:
        if self.comm.calls is not None and not memory.agrees(digest):
            raise mismatch(self.comm)

    def _all_gather_headers(self, buffers: HeaderBuffers, meanwhile: Meanwhile) -> None:
        collective = getattr(self.pg, _ALL_GATHER_SINGLE)
        tensors = (buffers.every_staged, buffers.own_staged)
        self._move(buffers, buffers.own, buffers.every, collective, *tensors, meanwhile=meanwhile)

    def _gather_headers(self, buffers: HeaderBuffers, dst: int, following: Messages, meanwhile: Meanwhile) -> Handle:
        is_dst, chosen = self.comm.rank == dst, _options(GatherOptions, rootRank=dst)
        outputs, arriving = ([buffers.parts], buffers.every) if is_dst else ([], None)
        sent = [buffers.own_staged]
        self._move(buffers, buffers.own, arriving, self.pg.gather, outputs, sent, chosen, meanwhile=meanwhile)
        return self._send_and_receive([], following)

    def _scatter_headers(self, buffers: HeaderBuffers, src: int, following: Messages) -> Handle:
        is_src, chosen = self.comm.rank == src, _options(ScatterOptions, rootRank=src)
        inputs, leaving = ([buffers.parts], buffers.every) if is_src else ([], None)
        self._move(buffers, leaving, buffers.own, self.pg.scatter, [buffers.own_staged], inputs, chosen)
        return self._send_and_receive([], following)

    def _broadcast_header(self, buffers: HeaderBuffers, src: int) -> None:
        leaving, arriving = (buffers.own, None) if self.comm.rank == src else (None, buffers.own)
        chosen = _options(BroadcastOptions, rootRank=src, asyncOp=False)
        self._move(buffers, leaving, arriving, self.pg.broadcast, [buffers.own_staged], chosen)

    def all_gather_segments(self, own: Sequence[Tensor], received: Sequence[Sequence[Tensor]]) -> Handle:
        """Give every rank every rank's segments, each once to each rank, without padding.

        Args:
            own: this rank's segments.
            received: for each rank, the segments to fill, of exactly its sizes; those of this rank get a copy.
        """
        if own and own[0].device.type != "cpu" and _are_alike(received):
            return self._all_gather_alike(own[0], [segments[0] for segments in received])
        copy_all(received[self.comm.rank], own)
        handles = [
            self.broadcast(own if rank == self.comm.rank else segments, rank) for rank, segments in enumerate(received)
        ]
        return Handle(handles, self.comm)

    def _all_gather_alike(self, own: Tensor, received: Sequence[Tensor]) -> Handle:
        """Do what `all_gather_segments` does for one segment of one size from each rank, in one collective."""
        every = own.new_empty((self.comm.size, own.numel()))
        work = getattr(self.pg, _ALL_GATHER_SINGLE)(every.view(-1), own.view(-1))
        return Handle([work], self.comm, lambda: copy_all(received, [*map(Tensor.view_as, every, received)]))

    def all_to_all(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Handle:
        """Send the i-th of `inputs`, on any device, to rank i, and fill the i-th of `outputs` with what rank i sent."""
        comm = self.comm
        parts = [as_native(comm.to_comm_device(x)).view(-1) for x in inputs]
        item_bytes = parts[0].element_size()
        sizes_out = [x.nbytes // item_bytes for x in outputs]
        received = torch.empty(sum(sizes_out), dtype=parts[0].dtype, device=comm.comm_device)
        work = self.pg.alltoall_base(received, torch.cat(parts), sizes_out, [x.numel() for x in parts])

        def finish() -> None:
            for output, part in zip(outputs, torch.split_with_sizes(received, sizes_out), strict=True):
                if part.dtype != output.dtype:
                    part = part.clone().view(output.dtype)  # a slice of bytes may not be aligned for the wider dtype
                copy_into(output, part)

        return Handle([work], comm, finish)

    def broadcast(self, segments: Sequence[Tensor], src: int) -> Handle:
        """Give every rank `src`'s segments, in place."""
        return Handle([self._broadcast(segment, src, async_op=True) for segment in segments], self.comm)

    def check_of_reduction(self, nbytes: int, dst: int | None) -> Check:
        """Return when the calls of `reduce` and `reduce_scatter` (`dst` is None) with so many bytes are compared."""
        return "if due"

    def check_of_broadcast(self, nbytes: int) -> Check:
        """Return when the calls of `broadcast_whole` with so many bytes are compared."""
        return "if due"

    def reduce(self, data: Tensor, dst: int | None, op: OpName, *, async_op: bool) -> Handle:
        """Reduce a contiguous tensor in place, into rank `dst`'s, or into every rank's if that is None.

        This, `reduce_scatter` and `broadcast_whole` expect that `check_call` has compared the call, when
        `check_of_reduction` or `check_of_broadcast` says so. Without `async_op`, they may block.
        """
        if dst is None:
            work = self.pg.allreduce([data], _of_op(AllreduceOptions, op, asyncOp=async_op))
        else:
            work = self.pg.reduce([data], _of_op(ReduceOptions, op, rootRank=dst))
        return Handle([work], self.comm)

    def reduce_scatter(self, output: Tensor, inputs: list[Tensor], op: OpName, *, async_op: bool) -> Handle:
        """Reduce the i-th tensors of all ranks, all of one shape and contiguous, into rank i's output."""
        work = self.pg.reduce_scatter([output], [inputs], _of_op(ReduceScatterOptions, op))
        return Handle([work], self.comm)

    def broadcast_whole(self, data: Tensor, src: int, *, async_op: bool) -> Handle:
        """Give every rank `src`'s contiguous tensor, in place."""
        return Handle([self._broadcast(data, src, async_op=async_op)], self.comm)

    def send(self, segments: Sequence[Tensor], dst: int) -> Handle:
        """Send segments to rank `dst`, which calls `receive` with the same sizes."""
        return self._send_and_receive([], [(segment, dst) for segment in segments])

    def receive(self, segments: Sequence[Tensor], src: int) -> Handle:
        """Fill segments with what rank `src` sends with `send`."""
        return self._send_and_receive([(segment, src) for segment in segments], [])

    def beside(self, kind: Kind, *, receiving: Messages = (), sending: Messages = ()) -> Handle:
        """Start to receive and to send; messages of one kind keep their order, whatever else is sent meanwhile.

        Only where `has_beside`.
        """
        raise NotImplementedError

    def _broadcast(self, data: Tensor, src: int, *, async_op: bool) -> Work | None:
        return self.pg.broadcast([as_native(data)], _options(BroadcastOptions, rootRank=src, asyncOp=async_op))

    def _move(
        self,
        buffers: HeaderBuffers,
        leaving: HeaderMemory | None,
        arriving: HeaderMemory | None,
        collective: Callable[..., Work | None],
        *arguments: object,
        meanwhile: Meanwhile = None,
    ) -> None:
        """Move headers by one of the backend's collectives; `arguments` refer to the memory on the group's device.

        Only what this rank sends and receives is copied to and from that device: each copy back is a wait of the host.
        """
        buffers.stage(leaving)
        work = collective(*arguments)
        if meanwhile is not None:
            meanwhile()
        wait_for([work], self.comm)
        buffers.fetch(arriving)

    def _send_and_receive(self, receiving: Messages, sending: Messages) -> Handle:
        return PairwiseHandle(self._start(receiving, sending, self._segment_tag()), self.comm)

    def _segment_tag(self) -> int:
        return SEGMENT_TAG

    def _start(self, receiving: Messages, sending: Messages, tag: int) -> list[Work]:
        pg = self.pg
        try:
            works = [pg.recv([segment], rank, tag) for segment, rank in receiving]
            return works + [pg.send([segment], rank, tag) for segment, rank in sending]
        except RuntimeError as error:  # gloo refuses to send to a rank that it knows to be gone
            raise translate_error(error, self.comm) from error


def _are_alike(received: Sequence[Sequence[Tensor]]) -> bool:
    return len({(len(one), *((x.shape, x.dtype, x.device) for x in one)) for one in received}) == 1 == len(received[0])


@cache
def _options(kind: type, **fields: object) -> Any:
    """Return the options of one of torch's collectives, such as `BroadcastOptions`, with some fields set."""
    made = kind()
    for name, value in fields.items():
        setattr(made, name, value)
    return made


@cache  # by the name of the operation, whose hash costs a tenth of that of torch's
def _of_op(kind: type, op: OpName, **fields: object) -> Any:
    return _options(kind, reduceOp=TORCH_OPS[op], **fields)
