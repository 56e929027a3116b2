"""How bytes travel between ranks: headers, small and of one fixed size, and segments, whose sizes both sides know.

A `Transport` is chosen once for each group. It uses the backend's collectives. On the CPU, messages go directly from
rank to rank instead (`PairwiseCpu`), which is faster; deleting that class would change no result.

Every header ends with the digest of this rank's calls (`Calls`), so that ranks that have made different calls find out
wherever a header is sent.
"""

from __future__ import annotations

import ctypes
import struct
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from datetime import timedelta
from functools import cache
from threading import Thread
from time import monotonic
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.distributed import (
    AllreduceOptions,
    BroadcastOptions,
    GatherOptions,
    ProcessGroup,
    ReduceOp,
    ScatterOptions,
    Work,
)

from lockstep.device import copy_into
from lockstep.dist.groups import SOLO, Comm
from lockstep.dist.reduce_ops import OpName, combine_in_place
from lockstep.dist.watch.failures import mismatch, timeout_error, translate_error
from lockstep.dist.watch.rounds import MOST_SMALL, Rounds
from lockstep.dist.watch.watch import interrupt
from lockstep.errors import CollectiveMismatchError, CollectiveTimeoutError, PeerError

# gloo matches sends and receives between two ranks by tag, in order. Messages of different sizes have different tags,
# because gloo aborts the process where a message is longer than expected; `watch.rounds` has the next one.
_HEADER_TAG, _SEGMENT_TAG = 0x10C4, 0x10C5
_TAG_BITS = 16

_WORD = struct.Struct("<q")
DIGEST_BYTES = _WORD.size  # at the end of every header

# Dtypes that every backend moves by name; all others travel as bytes.
_NATIVE_DTYPES = frozenset(
    {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.uint8, torch.int32, torch.int64}
)  # fmt: skip

# Renamed in torch 2.13; remove the second name when 2.12 is no longer supported.
_ALL_GATHER_SINGLE = "all_gather_single" if hasattr(ProcessGroup, "all_gather_single") else "_allgather_base"

_KEPT_BYTES = 2**16


class Handle:
    """A collective in flight. `wait` completes it, including the copy back to the caller's device and dtype."""

    __slots__ = ("_comm", "_finish", "_pending")

    def __init__(self, pending: Sequence[Work | Handle], comm: Comm, finish: Callable[[], None] | None = None) -> None:
        self._pending: tuple[Work | Handle, ...] = tuple(pending)
        self._comm = comm
        self._finish = finish

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until the result is available; further calls return at once, or raise again.

        **Raises**: PeerError if a rank is gone; CollectiveTimeoutError if a rank did not arrive in time; ValueError if
        the mean of integers is not a whole number.
        """
        for one in self._pending:
            if isinstance(one, Handle):
                one.wait(timeout)
            else:
                wait_for(one, self._comm, timeout)
        self._pending = ()
        if self._finish is not None:
            self._finish()
        self._finish = None
        return True

    def is_completed(self) -> bool:
        """Return whether `wait` would not block."""
        return all(one.is_completed() for one in self._pending)


class _PairwiseHandle(Handle):
    """Sends and receives in flight. gloo can't tell whether they are completed (torch 2.13).

    The first call of `is_completed` starts a thread that waits for them.
    """

    __slots__ = ("_outcome",)

    def __init__(self, pending: Sequence[Work], comm: Comm) -> None:
        super().__init__(pending, comm)
        self._outcome: Future[bool] | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until all are completed; see `Handle.wait`."""
        if timeout is not None:
            self.is_completed()  # a receive that times out itself closes all connections of the group (gloo)
        if self._outcome is None:
            return super().wait()
        try:
            return self._outcome.result(None if timeout is None else timeout.total_seconds())
        except TimeoutError as error:
            if self._outcome.done():
                raise
            raise timeout_error(self._comm, f"{timeout} are over") from error

    def is_completed(self) -> bool:
        """Return whether `wait` would not block."""
        if self._outcome is None:
            self._outcome = Future()
            Thread(target=self._watch, args=(self._outcome,), daemon=True).start()
        return self._outcome.done()

    def _watch(self, outcome: Future[bool]) -> None:
        try:
            outcome.set_result(super().wait())
        except Exception as error:
            outcome.set_exception(error)


class _SmallReduction(Handle):
    """An all_reduce of a small tensor between two ranks, in one message each way, which also holds the digests."""

    __slots__ = ("_data", "_op", "_rounds", "_transport")

    def __init__(self, transport: Transport, data: Tensor, op: OpName) -> None:
        self._transport, self._data, self._op = transport, data, op
        self._rounds: Rounds | None = transport.take_rounds()
        self._rounds.payload(data)[0].copy_(data)
        exchange = _PairwiseHandle(self._rounds.start(transport.pg, transport.comm), transport.comm)
        super().__init__([exchange], transport.comm)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until `data` is reduced; see `Handle.wait`."""
        super().wait(timeout)
        if self._rounds is not None:
            rounds, self._rounds = self._rounds, None
            self._complete(rounds)
        return True

    def _complete(self, rounds: Rounds) -> None:
        transport, data = self._transport, self._data
        if not rounds.merge():
            raise mismatch(transport.comm, all_know=True)
        other = rounds.payload(data)[1]
        with torch.no_grad():
            # In the order of the ranks, so that both have the same bits.
            if transport.comm.rank == 0:
                combine_in_place(data, other, self._op)
            else:
                combine_in_place(other, data, self._op)
                data.copy_(other)
            if self._op == "mean":
                data.div_(2)
        transport.give_back(rounds)


class HeaderMemory:
    """Headers of one size, one after the other in one piece of memory.

    Attributes:
        data: their bytes.
        address: start address of the memory.
        header_bytes: size of each header.
        views: one view for each header.
    """

    __slots__ = ("_ends", "address", "data", "header_bytes", "views")

    def __init__(self, number: int, header_bytes: int) -> None:
        self.data = bytearray(number * header_bytes)
        self.address = ctypes.addressof((ctypes.c_char * len(self.data)).from_buffer(self.data))
        self.header_bytes = header_bytes
        self.views = [memoryview(self.data)[k * header_bytes : (k + 1) * header_bytes] for k in range(number)]
        self._ends = range(header_bytes, number * header_bytes + 1, header_bytes)

    def stamp(self, digest: int) -> None:
        """Write the digest of this rank's calls to the end of each header."""
        for end in self._ends:
            _WORD.pack_into(self.data, end - DIGEST_BYTES, digest)

    def agrees(self, digest: int) -> bool:
        """Return whether every header ends with this digest."""
        word, data = _WORD.pack(digest), self.data
        return all(data.startswith(word, end - DIGEST_BYTES) for end in self._ends)


class HeaderBuffers:
    """Memory for the headers of one group and size, reused by every call: this rank's own header, and every rank's.

    Reuse does not only save allocations: a tensor that Python has released is freed by the backend's thread, which must
    then wait for the GIL. That costs a small collective a third of its time (gloo, torch 2.13).
    """

    def __init__(self, header_bytes: int, comm: Comm) -> None:
        self.own, self.every = HeaderMemory(1, header_bytes), HeaderMemory(comm.size, header_bytes)
        on_cpu = [torch.frombuffer(x.data, dtype=torch.uint8) for x in (self.own, self.every)]
        self.own_staged, self.every_staged = staged = [x.to(comm.comm_device) for x in on_cpu]
        self._copies = [] if comm.comm_device.type == "cpu" else list(zip(on_cpu, staged, strict=True))
        self.parts = list(torch.split(self.every_staged, header_bytes))
        self.of_others = {rank: part for rank, part in enumerate(self.parts) if rank != comm.rank}
        self.own_to_others = dict.fromkeys(self.of_others, self.own_staged)
        self.in_flight: list[Work] = []
        self._own_slice = slice(comm.rank * header_bytes, (comm.rank + 1) * header_bytes)

    def copy_own(self) -> None:
        """Copy this rank's header to its position among every rank's."""
        self.every.data[self._own_slice] = self.own.data

    def stage(self) -> None:
        """Copy the headers in this memory to the group's device."""
        for memory, staged in self._copies:
            staged.copy_(memory)

    def fetch(self) -> None:
        """Copy the headers that arrived on the group's device into this memory."""
        for memory, staged in self._copies:
            memory.copy_(staged)


class Transport:
    """Carries headers and segments within one group, by the collectives of its backend, on any device.

    Methods for headers take `HeaderBuffers`, and send from and receive into `own` and `every`. Segments are contiguous
    tensors on the group's device. All methods but `send` and `receive` are collective.
    """

    def __init__(self, comm: Comm) -> None:
        self.comm = comm
        self._buffers: dict[int, HeaderBuffers] = {}
        self._kept: deque[Tensor] = deque(maxlen=8)
        self._free_rounds: list[Rounds] = []

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

    def all_gather_headers(self, buffers: HeaderBuffers) -> None:
        """Give every rank every rank's header: from `own` to `every`.

        This and the other methods for headers raise CollectiveMismatchError where the ranks have made different calls.
        """
        digest = self._stamp(buffers.own)
        self._all_gather_headers(buffers)
        self._require_same_calls(buffers.every, digest)

    def gather_headers(self, buffers: HeaderBuffers, dst: int) -> None:
        """Give rank `dst` every rank's header: from `own` to its `every`."""
        digest = self._stamp(buffers.own)
        self._gather_headers(buffers, dst)
        if self.comm.rank == dst:
            self._require_same_calls(buffers.every, digest)

    def scatter_headers(self, buffers: HeaderBuffers, src: int) -> None:
        """Give rank i the i-th header of rank `src`: from its `every` to `own`."""
        digest = self._stamp(buffers.every if self.comm.rank == src else buffers.own)
        self._scatter_headers(buffers, src)
        self._require_same_calls(buffers.own, digest)

    def broadcast_header(self, buffers: HeaderBuffers, src: int) -> None:
        """Give every rank `src`'s header: from its `own` to every `own`."""
        digest = self._stamp(buffers.own)
        self._broadcast_header(buffers, src)
        self._require_same_calls(buffers.own, digest)

    def have_same_calls(self) -> bool:
        """Return whether all ranks have made the same calls; all get the same answer. **Collective**: every rank."""
        if "cpu" in self.comm.devices:
            rounds, agrees = self.take_rounds(), True
            try:
                for step in rounds.steps:
                    for work in rounds.start(self.pg, self.comm, step, with_own=step == 1):
                        wait_for(work, self.comm)
                    agrees = rounds.merge()
            except (PeerError, CollectiveTimeoutError):
                interrupt(self.comm)  # others may wait for this rank, in a later round
                raise
            self.give_back(rounds)
            return agrees
        digest = 0 if self.comm.calls is None else self.comm.calls.digest
        digests = torch.tensor([digest, ~digest], device=self.comm.comm_device)
        wait_for(self.pg.allreduce([digests], options(AllreduceOptions, reduceOp=ReduceOp.MAX)), self.comm)
        highest, lowest = digests.tolist()
        return bool(highest == ~lowest)

    def reduces_small(self, data: Tensor) -> bool:
        """Return whether `start_small` takes `data`: a matter of its shape alone."""
        return False

    def start_small(self, data: Tensor, op: OpName) -> Handle:
        """Reduce a small tensor of the group's device in place; `wait` raises if the calls differ."""
        return _SmallReduction(self, data, op)

    def take_rounds(self) -> Rounds:
        """Return memory that no call in flight uses."""
        return self._free_rounds.pop() if self._free_rounds else Rounds(self.comm)

    def give_back(self, rounds: Rounds) -> None:
        """Let other calls use this memory."""
        self._free_rounds.append(rounds)

    def _stamp(self, memory: HeaderMemory) -> int:
        calls = self.comm.calls
        if calls is None:
            return 0
        memory.stamp(calls.digest)
        return calls.digest

    def _require_same_calls(self, memory: HeaderMemory, digest: int) -> None:
        if self.comm.calls is not None and not memory.agrees(digest):
            raise mismatch(self.comm)

    def _all_gather_headers(self, buffers: HeaderBuffers) -> None:
        self._move(buffers, getattr(self.pg, _ALL_GATHER_SINGLE), buffers.every_staged, buffers.own_staged)

    def _gather_headers(self, buffers: HeaderBuffers, dst: int) -> None:
        outputs = [buffers.parts] if self.comm.rank == dst else []
        self._move(buffers, self.pg.gather, outputs, [buffers.own_staged], options(GatherOptions, rootRank=dst))

    def _scatter_headers(self, buffers: HeaderBuffers, src: int) -> None:
        inputs = [buffers.parts] if self.comm.rank == src else []
        self._move(buffers, self.pg.scatter, [buffers.own_staged], inputs, options(ScatterOptions, rootRank=src))

    def _broadcast_header(self, buffers: HeaderBuffers, src: int) -> None:
        chosen = options(BroadcastOptions, rootRank=src, asyncOp=False)
        self._move(buffers, self.pg.broadcast, [buffers.own_staged], chosen)

    def all_gather_segments(self, own: Sequence[Tensor], received: Sequence[Sequence[Tensor]]) -> Handle:
        """Give every rank every rank's segments, each once to each rank, without padding.

        Args:
            own: this rank's segments, flat uint8.
            received: for each rank, the segments to fill, of exactly its sizes; those of this rank get a copy.
        """
        copy_all(received[self.comm.rank], own)
        handles = [
            self.broadcast(own if rank == self.comm.rank else segments, rank) for rank, segments in enumerate(received)
        ]
        return Handle(handles, self.comm)

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

    def broadcast(self, segments: Sequence[Tensor], src: int, *, async_op: bool = True) -> Handle:
        """Give every rank `src`'s segments, in place."""
        pg, chosen = self.pg, options(BroadcastOptions, rootRank=src, asyncOp=async_op)
        return Handle([pg.broadcast([as_native(segment)], chosen) for segment in segments], self.comm)

    def send(self, segments: Sequence[Tensor], dst: int) -> Handle:
        """Send segments to rank `dst`, which calls `receive` with the same sizes."""
        return self._send_and_receive([], [(segment, dst) for segment in segments])

    def receive(self, segments: Sequence[Tensor], src: int) -> Handle:
        """Fill segments with what rank `src` sends with `send`."""
        return self._send_and_receive([(segment, src) for segment in segments], [])

    def _move(self, buffers: HeaderBuffers, collective: Callable[..., Work], *arguments: object) -> None:
        """Move headers by one of the backend's collectives; `arguments` refer to the memory on the group's device."""
        buffers.stage()
        wait_for(collective(*arguments), self.comm)
        buffers.fetch()

    def _send_and_receive(
        self, receiving: Sequence[tuple[Tensor, int]], sending: Sequence[tuple[Tensor, int]]
    ) -> Handle:
        pg = self.pg
        try:
            works = [pg.recv([segment], rank, _SEGMENT_TAG) for segment, rank in receiving]
            works += [pg.send([segment], rank, _SEGMENT_TAG) for segment, rank in sending]
        except RuntimeError as error:  # gloo refuses to send to a rank that it knows to be gone
            raise translate_error(error, self.comm) from error
        return _PairwiseHandle(works, self.comm)


class PairwiseCpu(Transport):
    """A transport that sends directly from rank to rank, on the CPU.

    gloo's sends and receives need no thread switch and no copy: an all_gather of 1 KiB takes half as long as gloo's
    own, and one of 16 MiB a third (2 and 4 ranks, torch 2.13; docs/decisions/0008-pairs-on-the-cpu.md). On
    accelerators, which run messages in order, pairs of sends and receives could block each other.
    """

    def reduces_small(self, data: Tensor) -> bool:
        """See `Transport`. Between two ranks, one exchange replaces the comparison and gloo's all_reduce."""
        return self.comm.size == 2 and 0 < data.numel() <= MOST_SMALL

    def _all_gather_headers(self, buffers: HeaderBuffers) -> None:
        buffers.copy_own()
        self._exchange_headers(buffers, buffers.of_others, buffers.own_to_others)

    def _gather_headers(self, buffers: HeaderBuffers, dst: int) -> None:
        if self.comm.rank == dst:
            buffers.copy_own()
            self._exchange_headers(buffers, buffers.of_others, {})
        else:
            self._exchange_headers(buffers, {}, {dst: buffers.own_staged})

    def _scatter_headers(self, buffers: HeaderBuffers, src: int) -> None:
        if self.comm.rank == src:
            buffers.own.data[:] = buffers.every.views[src]
            self._exchange_headers(buffers, {}, buffers.of_others)
        else:
            self._exchange_headers(buffers, {src: buffers.own_staged}, {})

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
        exchange = self._send_and_receive(
            [(as_native(received[rank].detach()), rank) for rank in others if received[rank].numel()],
            [(as_native(comm.to_comm_device(inputs[rank])), rank) for rank in others if inputs[rank].numel()],
        )
        copy_into(received[comm.rank], inputs[comm.rank].detach())
        return Handle([exchange], comm, lambda: copy_all(outputs, received))

    def _others(self) -> list[int]:
        return [rank for rank in range(self.comm.size) if rank != self.comm.rank]

    def _exchange_headers(
        self, buffers: HeaderBuffers, receiving: Mapping[int, Tensor], sending: Mapping[int, Tensor]
    ) -> None:
        """Receive from some ranks and send to some, all at once.

        If this fails for a rank that is gone, the messages of the other ranks are still started, and left in flight.
        They may themselves be waiting for that rank, and find out on their own.
        """
        pg = self.pg
        works = buffers.in_flight = []
        refusal = None
        tag = _HEADER_TAG + (buffers.own.header_bytes << _TAG_BITS)
        for start, parts in ((pg.recv, receiving), (pg.send, sending)):
            for rank, part in parts.items():
                try:
                    works.append(start([part], rank, tag))
                except RuntimeError as error:
                    refusal = error
        if refusal is not None:
            raise translate_error(refusal, self.comm) from refusal
        for work in works:
            wait_for(work, self.comm)
        buffers.in_flight = []


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

    def broadcast(self, segments: Sequence[Tensor], src: int, *, async_op: bool = True) -> Handle:
        """See `Transport`."""
        return Handle((), self.comm)

    def _send_and_receive(self, *nothing: object) -> Handle:
        return Handle((), self.comm)

    def _exchange_headers(self, *nothing: object) -> None:
        pass


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


def copy_all(data: Sequence[Tensor], results: Sequence[Tensor]) -> None:
    """Copy each result into its tensor, as `copy_into` does, unless they are the same tensor."""
    for one, result in zip(data, results, strict=True):
        if result is not one:
            copy_into(one, result)


def wait_unless_async(handle: Handle, async_op: bool) -> Handle | None:
    """Return the handle if `async_op`, else wait for it and return None."""
    if async_op:
        return handle
    handle.wait()
    return None


def wait_for(work: Work, comm: Comm, timeout: timedelta | None = None) -> None:
    """Wait for one piece of work; see `Handle.wait` for what it raises."""
    calls = comm.calls
    if calls is not None:
        calls.since, calls.waiting = monotonic(), calls.number
    try:
        if timeout is None:
            work.wait()
        else:
            work.wait(timeout)
    except RuntimeError as error:
        translated = translate_error(error, comm)
        # What the backend says then is only how the watch has ended the wait.
        raise translated from None if isinstance(translated, CollectiveMismatchError) else error
    finally:
        if calls is not None:
            calls.waiting = 0


def is_plain_memory(data: Tensor) -> bool:
    """Return whether a tensor's memory holds exactly its values, in order, so that bytes may be written there."""
    return data.is_contiguous() and not data.is_neg() and not data.is_conj()


def as_bytes(data: Tensor) -> Tensor:
    """Return the bytes of a contiguous tensor, as a flat uint8 view of the same memory."""
    # This works for any dtype, also for those that a backend does not know. as_strided is needed because view(dtype)
    # fails for a 0-dim tensor, and for one element of a strided view, which counts as contiguous whatever its stride.
    return data.detach().as_strided((data.numel(),), (1,)).view(torch.uint8)


def as_native(wire: Tensor) -> Tensor:
    """Return a contiguous tensor unchanged, or as bytes if not every backend supports its dtype."""
    return wire if wire.dtype in _NATIVE_DTYPES else as_bytes(wire)


def bytes_of(data: Tensor) -> ctypes.Array[ctypes.c_char]:
    """Return a writable buffer over a contiguous CPU tensor's memory, which it keeps alive."""
    buffer = (ctypes.c_char * (data.numel() * data.element_size())).from_address(data.data_ptr())
    buffer._owner = data  # type: ignore[attr-defined]  # the buffer borrows the tensor's memory
    return buffer


@cache
def options(kind: type, **fields: object) -> Any:
    """Return the options of one of torch's collectives, such as `BroadcastOptions`, with some fields set."""
    made = kind()
    for name, value in fields.items():
        setattr(made, name, value)
    return made
