"""Small messages that begin with the digest of a rank's calls, with which a collective needs no check of its own.

All are of a few fixed sizes, each with a tag of its own: gloo ends the process where a message is longer than the
memory for it. Ranks whose messages differ in size wait for each other instead, until the watch finds out why.
"""

from __future__ import annotations

import ctypes
import struct
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from threading import Lock

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from lockstep.errors import DistError
from lockstep.groups import Comm
from lockstep.transport.handles import Handle, InFlight, PairwiseHandle, wait_for
from lockstep.transport.memory import memmove
from lockstep.transport.reduce_ops import OpName, combine
from lockstep.watch.failures import mismatch, translate_error
from lockstep.watch.watch import interrupt

# From a rank: the digest of its calls, and the number of its message. From the first rank: the lowest and the highest
# digest.
_HEAD = struct.Struct("<2q")
HEAD_BYTES = _HEAD.size
# Sizes of messages, and how many bytes of them the first rank takes in one collective at most.
ROOMS = (512, 4096, 65536)
_MOST_BYTES = 2**20
# Tags of gloo's sends and receives: 31 bits, of which the upper ones are free.
TAG_BITS = 16
_REDUCE_TAGS = {512: 0x10C6, 4096: 0x10C8, 65536: 0x10C9}
_ONE_WAY_TAGS = {512: 0x10CA, 4096: 0x10CB, 65536: 0x10CC}
_ANSWER_TAG = 0x10CD


class Message:
    """Memory for one message: a head of two words, and data.

    Attributes:
        memory: its bytes.
        tensors: a list of one tensor, all bytes, as torch's sends and receives take it.
        address: address of the data.
    """

    __slots__ = ("_views", "address", "memory", "tensors")

    def __init__(self, size: int) -> None:
        self.memory = bytearray(size)
        self.address = ctypes.addressof((ctypes.c_char * size).from_buffer(self.memory)) + HEAD_BYTES
        with torch.inference_mode(False):
            self.tensors = [torch.frombuffer(self.memory, dtype=torch.uint8)]
        self._views: dict[tuple[torch.dtype, torch.Size], Tensor] = {}

    def view_like(self, data: Tensor) -> Tensor:
        """Return the data as a tensor of this dtype and shape."""
        key = (data.dtype, data.shape)
        view = self._views.get(key)
        if view is None:
            with torch.inference_mode(False):
                view = self.tensors[0][HEAD_BYTES : HEAD_BYTES + data.nbytes].view(data.dtype).view(data.shape)
            if len(self._views) < 64:
                self._views[key] = view
        return view


class Exchange:
    """All ranks of a group compare the digests of their calls, and reduce a small tensor, if they agree.

    The first rank receives from all, combines in the order of the ranks, and answers. That is two messages for each
    rank, and the bits are the same on all. Between two ranks, too, this is faster than if both send at the same time
    (1.2 times, by medians; docs/decisions/0026-calls-that-do-not-match.md).

    The first rank starts to receive before the call that needs it, as `SmallMessages` keeps the order: gloo then sends
    at once, instead of asking for it first. That takes a fifth off an `all_reduce` of 4 bytes (two ranks, torch 2.13).

    Args:
        comm: the group.
        room: size of the messages.

    Attributes:
        comm: the group.
        collects: whether this is the first rank, which answers the others.
        number: number of this use, by which this rank knows the answer to it.
    """

    __slots__ = ("_begun", "_digest", "_own", "_received", "_tag", "_works", "collects", "comm", "number")

    def __init__(self, comm: Comm, room: int) -> None:
        self.comm, self._tag = comm, _REDUCE_TAGS[room]
        self.collects = comm.rank == 0
        self._own = Message(room)
        self._received = [Message(room) for _ in range(comm.size - 1 if self.collects else 1)]
        self._digest = self.number = 0
        self._works: list[Work] = []
        self._begun: list[Work] = []

    def expect(self, pg: ProcessGroup) -> None:
        """On the first rank, start to receive, unless it has been done.

        **Raises**: RuntimeError where gloo knows that a rank is gone.
        """
        if self.collects and not self._works:
            works: list[Work] = []
            try:
                for peer, message in enumerate(self._received, start=1):
                    works.append(pg.recv(message.tensors, peer, self._tag))
            except RuntimeError:
                self._begun += works  # gloo may still use their memory
                raise
            self._works = works

    def start(self, pg: ProcessGroup, data: Tensor | None = None) -> None:
        """Start it, after `expect`; `data` is contiguous."""
        comm = self.comm
        if comm.calls is not None:
            self._digest = comm.calls.digest
        if self.collects:
            return
        try:
            own = self._own
            _HEAD.pack_into(own.memory, 0, self._digest, self.number)
            if data is not None:
                memmove(own.address, data.data_ptr(), data.nbytes)
            self._works = [
                pg.recv(self._received[0].tensors, 0, _answer_tag(self.number)),
                pg.send(own.tensors, 0, self._tag),
            ]
        except RuntimeError as error:
            raise translate_error(error, comm) from error

    def finish(self, data: Tensor | None = None, op: OpName = "sum") -> bool:
        """Wait for the other ranks; return whether all have made the same calls. Then `data` is reduced."""
        if self.collects:
            try:
                return self._collect(data, op)
            except DistError:
                interrupt(self.comm)  # the others wait for this rank
                raise
        wait_for(self._works, self.comm)
        answer = self._received[0]
        low, high = _HEAD.unpack_from(answer.memory)
        if low == high and data is not None:
            memmove(data.data_ptr(), answer.address, data.nbytes)
        return bool(low == high)

    def _collect(self, data: Tensor | None, op: OpName) -> bool:
        comm, received = self.comm, self._received
        wait_for(self._works, comm)
        heads = [_HEAD.unpack_from(message.memory) for message in received]
        low, high = min(self._digest, min(heads)[0]), max(self._digest, max(heads)[0])
        agree, answer = low == high, received[0]
        if agree and data is not None:
            parts = [message.view_like(data) for message in received]
            combine([data, *parts], op, parts[0])
        _HEAD.pack_into(answer.memory, 0, low, high)
        pg = comm.pg
        if pg is None:
            raise DistError(f"the group was destroyed while a reduction was in flight ({comm.this_rank})")
        try:
            answers = [
                pg.send(answer.tensors, peer, _answer_tag(number)) for peer, (_, number) in enumerate(heads, start=1)
            ]
        except RuntimeError as error:
            raise translate_error(error, comm) from error
        if agree and data is not None:
            memmove(data.data_ptr(), answer.address, data.nbytes)  # while the others get it
        wait_for(answers, comm)
        self._works = []
        return bool(agree)


class SmallMessages:
    """The small messages of one group, and the memory for them, which calls use again.

    The ranks of the group must communicate on the CPU.

    Attributes:
        in_flight: the handles of its messages.
    """

    def __init__(self, comm: Comm) -> None:
        self._comm = comm
        self._others = [rank for rank in range(comm.size) if rank != comm.rank]
        # Those that are not in use, in the order in which they expect messages.
        self._exchanges: dict[int, deque[Exchange]] = {room: deque() for room in ROOMS}
        self._order = Lock()  # of what is expected: a thread may give an exchange back
        self._messages: dict[int, list[Message]] = {room: [] for room in ROOMS}
        self._exchanged = 0
        self.in_flight = InFlight()
        self._completed = Handle((), comm)
        self._lost: list[object] = []  # works that failed, and their memory, which gloo may still use

    def compare(self, pg: ProcessGroup) -> bool:
        """Return whether all ranks have made the same calls; all get the same answer. **Collective**."""
        return self._exchange(pg, ROOMS[0], None, "sum")

    def reduce(self, pg: ProcessGroup, data: Tensor, op: OpName, room: int) -> None:
        """Reduce a contiguous tensor of the CPU in every rank; `room_for` gives the room. **Collective**.

        **Raises**: CollectiveMismatchError on every rank, with nothing changed.
        """
        if not self._exchange(pg, room, data, op):
            raise mismatch(self._comm, all_know=True)

    def broadcast(self, pg: ProcessGroup, data: Tensor, src: int, room: int, *, async_op: bool) -> Handle:
        """Copy rank `src`'s contiguous tensor of the CPU into every other rank's.

        A rank whose calls differ from those of `src` raises CollectiveMismatchError; with `async_op`, in `wait`.
        """
        if self._comm.rank == src:
            return self._send(pg, data, self._others, room, async_op)

        def copy(messages: list[Message]) -> None:
            memmove(data.data_ptr(), messages[0].address, data.nbytes)

        return self._receive(pg, (src,), room, copy, async_op)

    def reduce_to(self, pg: ProcessGroup, data: Tensor, dst: int, op: OpName, room: int, *, async_op: bool) -> Handle:
        """Reduce a contiguous tensor of the CPU into rank `dst`'s; those of the others stay as they are.

        Rank `dst` raises CollectiveMismatchError, if the calls of another rank differ from its own; with `async_op`, in
        `wait`.
        """
        if self._comm.rank != dst:
            return self._send(pg, data, (dst,), room, async_op)

        def reduce(messages: list[Message]) -> None:
            parts = [message.view_like(data) for message in messages]
            total = parts[0]
            parts.insert(dst, data)
            combine(parts, op, total)
            memmove(data.data_ptr(), messages[0].address, data.nbytes)

        return self._receive(pg, self._others, room, reduce, async_op)

    def _send(self, pg: ProcessGroup, data: Tensor, peers: Sequence[int], room: int, async_op: bool) -> Handle:
        comm, message = self._comm, self._message(room)
        _HEAD.pack_into(message.memory, 0, 0 if comm.calls is None else comm.calls.digest, 0)
        memmove(message.address, data.data_ptr(), data.nbytes)
        try:
            works = [pg.send(message.tensors, peer, _ONE_WAY_TAGS[room]) for peer in peers]
        except RuntimeError as error:
            raise translate_error(error, comm) from error
        return self._complete(works, lambda: self._messages[room].append(message), async_op)

    def _receive(
        self,
        pg: ProcessGroup,
        peers: Sequence[int],
        room: int,
        use: Callable[[list[Message]], None],
        async_op: bool,
    ) -> Handle:
        comm, messages = self._comm, [self._message(room) for _ in peers]
        digest = 0 if comm.calls is None else comm.calls.digest
        try:
            works = [
                pg.recv(message.tensors, peer, _ONE_WAY_TAGS[room])
                for message, peer in zip(messages, peers, strict=True)
            ]
        except RuntimeError as error:
            raise translate_error(error, comm) from error

        def finish() -> None:
            for message in messages:
                if _HEAD.unpack_from(message.memory)[0] != digest:
                    raise mismatch(comm)
            use(messages)
            self._messages[room].extend(messages)

        return self._complete(works, finish, async_op)

    def _complete(self, works: Sequence[Work], finish: Callable[[], None], async_op: bool) -> Handle:
        if async_op:
            return self.in_flight.started(works, self._comm, finish)
        try:
            wait_for(works, self._comm)
        except BaseException:
            self._lost.append((works, finish))
            raise
        finish()
        return self._completed

    def _message(self, room: int) -> Message:
        free = self._messages[room]
        return free.pop() if free else Message(room)

    def _exchange(self, pg: ProcessGroup, room: int, data: Tensor | None, op: OpName) -> bool:
        exchange = self.take(pg, room)
        exchange.start(pg, data)
        agrees = exchange.finish(data, op)
        self.give_back(exchange, room)
        return agrees

    def take(self, pg: ProcessGroup, room: int) -> Exchange:
        """Return the exchange that expects the next messages."""
        free = self._exchanges[room]
        with self._order:
            exchange = free.popleft() if free else Exchange(self._comm, room)
            self._exchanged += 1
            exchange.number = self._exchanged
            try:
                exchange.expect(pg)
            except RuntimeError as error:
                interrupt(self._comm)  # the others wait for this rank
                raise translate_error(error, self._comm) from error
        return exchange

    def give_back(self, exchange: Exchange, room: int) -> None:
        """Let others use an exchange, which expects the messages of its next use."""
        with self._order:
            pg = self._comm.pg
            if pg is not None:
                with suppress(RuntimeError):  # a rank is gone, perhaps properly: the next use says so
                    exchange.expect(pg)
            self._exchanges[room].append(exchange)


class SmallReduction(PairwiseHandle):
    """What `SmallMessages.reduce` does, in flight. It does not keep the group alive."""

    __slots__ = ("_data", "_error", "_exchange", "_op", "_room", "_small")

    def __init__(self, small: SmallMessages, pg: ProcessGroup, data: Tensor, op: OpName, room: int) -> None:
        self._exchange: Exchange | None = small.take(pg, room)
        super().__init__((), self._exchange.comm)
        self._small, self._data, self._op, self._room = small, data, op, room
        self._error: DistError | None = None
        small.in_flight.keep(self)
        self._exchange.start(pg, data)

    def leave_alone(self) -> None:
        """On the first rank, start a thread that answers the others: they may wait before this rank does."""
        if self._exchange is not None and self._exchange.collects:
            self.is_completed()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until the tensor is reduced; see `Handle.wait`."""
        super().wait(timeout)
        if self._error is not None:
            raise self._error
        return True

    def _complete(self) -> bool:
        exchange = self._exchange
        if exchange is not None:
            agrees = exchange.finish(self._data, self._op)
            self._exchange = None
            self._small.give_back(exchange, self._room)
            self._small.in_flight.drop(self)
            if not agrees:
                self._error = mismatch(self._comm, all_know=True)
        return True


def room_for(nbytes: int, size: int) -> int | None:
    """Return the size of the messages that carry so many bytes of each rank of a group; None if they don't."""
    for room in ROOMS:
        if nbytes <= room - HEAD_BYTES:
            return room if size > 1 and (room == ROOMS[0] or room * size <= _MOST_BYTES) else None
    return None


def _answer_tag(number: int) -> int:
    # The first rank may answer several messages of a rank in any order.
    return tag_of(_ANSWER_TAG, number)


def tag_of(kind: int, value: int) -> int:
    """Return a tag of one kind of messages that holds the last 15 bits of a value."""
    return kind | (value & 0x7FFF) << TAG_BITS
