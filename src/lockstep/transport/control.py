"""The control plane: what the hosts of a group tell each other, over gloo, beside the tensors of their devices.

Its operation is `exchange`: each rank gives bytes, and gets those of all. Every call that needs the control plane uses
it, with slots of the same size. So ranks whose calls differ still complete the same exchange, learn of the difference,
and can use the group further. Besides, a `GatherHandle` brings the bytes of all to one rank while they go on.
"""

from __future__ import annotations

import json
import struct
import threading
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache, wraps
from typing import Any
from weakref import ref

import torch
import torch.distributed as torch_dist
from torch import Tensor
from torch.distributed import ProcessGroup, distributed_c10d

from lockstep.calls import Record
from lockstep.errors import DistError, PeerError, error_in_words
from lockstep.groups import Comm, control_groups
from lockstep.transport.handles import Handle, in_backend
from lockstep.transport.moving import all_gather_single, bytes_of, transfer
from lockstep.watch.diagnosis import described

_SLOT_BYTES = 256
# Each slot begins with: digest of the calls, whether the rank reports a failure, length of its payload.
_HEAD = struct.Struct("<3q")
_INLINE_BYTES = _SLOT_BYTES - _HEAD.size
_MOST_FAILURE_BYTES = 480
# Up to so many ranks, gloo's ring (n - 1 messages one after the other) is hardly longer than a tree there and back
# (2 log n): 7 against 6 at 8 ranks, but 1,023 against 20 at 1,024.
_RING_RANKS = 8
_CPU = torch.device("cpu")
_GATHER_TAG, _TREE_TAG = 0x10C5, 0x10C6  # users' own messages have others
_LENGTH = struct.Struct("<q")
_GATHERED_BYTES, _DOWN_BYTES = 4096, 1024  # of the first message of a gathering, and of what goes down the tree


_names = threading.local()


@cache
def _let_groups_be_named() -> None:
    """Let a thread say in `_names.next` the name of the group that it makes next.

    torch would name it by the number of groups that each rank is in. Where these differ, the ranks would wait for each
    other at different keys of the store. There is no public way to say a name (2.13).
    """
    torchs_name = distributed_c10d._process_group_name

    @wraps(torchs_name)
    def name_of(*args: Any, **options: Any) -> Any:
        return vars(_names).pop("next", None) or torchs_name(*args, **options)

    distributed_c10d._process_group_name = name_of


def control_group(comm: Comm) -> ProcessGroup | None:
    """Return the group over which the hosts of `comm` speak; None where no group exists.

    It is the group itself where gloo serves its CPU, else one beside it, which torch keeps for as long as the default
    group.

    **Collective** at the first call in a group without gloo for the CPU: every rank of the group.
    """
    group = comm.pg
    if group is None or comm.backends.get("cpu") == "gloo":
        return group
    if group not in control_groups:
        _let_groups_be_named()
        _names.next = f"{distributed_c10d._world.pg_names[group]}/control"
        try:
            with in_backend(comm):
                beside = torch_dist.new_group(
                    list(comm.ranks), backend="gloo", timeout=comm.timeout, use_local_synchronization=True
                )
        finally:
            _names.next = None
        control_groups[group] = ref(beside)
    return control_groups[group]()


def exchange(comm: Comm, payload: bytes = b"", failure: str | None = None) -> list[bytes]:
    """Give every rank every rank's bytes.

    Args:
        comm: the group.
        payload: this rank's bytes, any number.
        failure: why this rank can't take part in what follows, in place of `payload`.

    **Collective**: every rank of the group. The other ranks may be in other calls, as long as these exchange, too.

    **Raises**: CollectiveMismatchError on every rank, where they have made different calls; PeerError, naming the first
    rank with a `failure`, on all ranks without one. Those with one get a list, and raise their own errors.

    **Cost**: up to 8 ranks, 256 bytes from each rank to each, in one call of gloo. Above, 2 log n messages one after
    the other: some 128 n log n bytes in all go up the tree, and 1 KiB goes down it to each rank; log n further messages
    where all bytes together can't be compressed to that. Of 256 bytes, 232 are the payload's; a longer one is sent by
    one broadcast for each rank, all in flight at once.
    """
    calls = comm.calls
    if calls is None or comm.is_alone:
        return [payload] * comm.size
    calls.raise_failure()
    if comm.size == 1:
        return [payload]
    if failure is not None:
        # A file's name may hold what UTF-8 can't encode.
        payload = failure.encode(errors="backslashreplace")[:_MOST_FAILURE_BYTES]
    own = _HEAD.pack(calls.digest, failure is not None, len(payload)) + payload[:_INLINE_BYTES]
    with in_backend(comm):
        every = _gather_slots(torch.frombuffer(bytearray(own.ljust(_SLOT_BYTES, b"\0")), dtype=torch.uint8), comm)
    slots = [every[start : start + _SLOT_BYTES] for start in range(0, len(every), _SLOT_BYTES)]
    heads = [_HEAD.unpack_from(slot) for slot in slots]
    if any(digest != calls.digest for digest, _, _ in heads):
        exported = json.dumps(calls.export()).encode()
        calls.reset()  # all ranks have found the difference at once, and can use the group further
        records = enumerate(map(zlib.decompress, exchange(comm, zlib.compress(exported))))
        raise described(comm, {rank: Record(json.loads(one)) for rank, one in records}, ())
    found = [bytes(slot[_HEAD.size :][:length]) for slot, (_, _, length) in zip(slots, heads, strict=True)]
    is_refused = any(failed for _, failed, _ in heads)  # then only the messages of failures are sent as a whole
    lengths = [max(length - _INLINE_BYTES, 0) if failed or not is_refused else 0 for _, failed, length in heads]
    if any(lengths):
        rests = [torch.empty(length, dtype=torch.uint8, device=_CPU) for length in lengths]
        if lengths[comm.rank]:
            rests[comm.rank] = torch.frombuffer(bytearray(payload[_INLINE_BYTES:]), dtype=torch.uint8)
        broadcast_from_all([(rest, rank) for rank, rest in enumerate(rests) if rest.numel()], comm)
        found = [one + bytes(bytes_of(rest)) for one, rest in zip(found, rests, strict=True)]
    failures = [
        one.decode(errors="replace") if failed else None for one, (_, failed, _) in zip(found, heads, strict=True)
    ]
    if failure is None:
        require_no_failure(failures, comm)
    return found


def _gather_slots(own: Tensor, comm: Comm) -> memoryview:
    """Return the slots of all ranks, one after the other; `own` is this rank's."""
    group, every = control_group(comm), torch.empty(comm.size * _SLOT_BYTES, dtype=torch.uint8, device=_CPU)
    if comm.size <= _RING_RANKS:
        all_gather_single(every, own, group=group)
        return bytes_of(every)
    slots = every.view(comm.size, _SLOT_BYTES)
    slots[comm.rank] = own
    step = 1
    while step < comm.size and not comm.rank & step:  # to rank 0: this rank collects those of the ranks behind it
        if comm.rank + step < comm.size:
            behind = slots[comm.rank + step : comm.rank + 2 * step]
            torch_dist.recv(behind, group_src=comm.rank + step, group=group, tag=_TREE_TAG)
        step *= 2
    if comm.rank:
        torch_dist.send(slots[comm.rank : comm.rank + step], group_dst=comm.rank - step, group=group, tag=_TREE_TAG)
    # Most slots are alike, as for a check, or all but one, as in a broadcast: a thousand become some hundred bytes.
    packed = b"" if comm.rank else zlib.compress(bytes_of(every), 1)
    down = _framed(packed, _DOWN_BYTES)
    torch_dist.broadcast(down, group_src=0, group=group)
    (length,) = _LENGTH.unpack_from(framed := bytes_of(down))
    room = _DOWN_BYTES - _LENGTH.size
    found = bytes(framed[_LENGTH.size :])
    if length > room:
        rest = torch.frombuffer(bytearray(packed[room:] or length - room), dtype=torch.uint8)
        torch_dist.broadcast(rest, group_src=0, group=group)
        found += bytes(bytes_of(rest))
    return memoryview(zlib.decompress(found[:length]))


def _framed(payload: bytes, size: int) -> Tensor:
    """Return a message of `size` bytes: the length of a payload, and as many of its bytes as there is room for."""
    return torch.frombuffer(
        bytearray(_LENGTH.pack(len(payload)) + payload)[:size].ljust(size, b"\0"), dtype=torch.uint8
    )


def broadcast_from_all(segments: Sequence[tuple[Tensor, int]], comm: Comm) -> None:
    """Give every rank every rank's segments, in place: flat tensors of the CPU, each with the rank that sends it.

    **Collective**: every rank, with the same sizes. **Cost**: one broadcast for each segment, all in flight at once.
    """
    if comm.is_alone:
        return
    group = control_group(comm)
    with in_backend(comm):
        works = [torch_dist.broadcast(x, group_src=rank, group=group, async_op=True) for x, rank in segments]
    Handle(works, comm).wait()


def transfer_between_hosts(
    receiving: Sequence[tuple[Tensor, int]], sending: Sequence[tuple[Tensor, int]], comm: Comm, tag: int
) -> Handle:
    """Do what `transfer` does with tensors of the CPU, on the control plane; a user's own messages have other tags."""
    return Handle((), comm) if comm.is_alone else transfer(receiving, sending, comm, control_group(comm), tag)


@contextmanager
def report_failure(comm: Comm, kind: type[BaseException] = Exception) -> Iterator[None]:
    """If the block raises, send the error to the other ranks, which are in `exchange` or will be.

    Args:
        comm: the group.
        kind: the class of errors that are sent.
    """
    try:
        yield
    except kind as error:
        if comm.calls is None or comm.calls.failure is None:  # else the watch has told all ranks of a failure
            with suppress(DistError):  # this rank raises its own error
                exchange(comm, failure=error_in_words(error))
        raise


def require_no_failure(failures: Sequence[str | None], comm: Comm) -> None:
    """Raise PeerError if some rank has failed, naming the first; the failing rank itself raises its own error."""
    for rank, failure in enumerate(failures):
        if failure is not None:
            raise PeerError(
                f"rank {rank} of {comm.size} could not take part: {failure} (seen on {comm.this_rank}). "
                "The group can be used further",
                rank=rank,
                cause=failure,
            )


class GatherHandle:
    """Every rank's bytes on their way to rank `dst`; the ranks go on, and call other collectives.

    Args:
        payload: this rank's bytes.
        dst: rank within the group.
        comm: the group.

    **Collective**: every rank. Each must call `wait`, in the order in which the handles were made.

    **Cost**: 4 KiB from each rank to `dst`, in one `gather` of gloo; a further message for what does not fit.
    """

    def __init__(self, payload: bytes, dst: int, comm: Comm) -> None:
        self._comm = comm
        self._gathered = [payload] * comm.size if comm.rank == dst else None
        self._every: list[Tensor] = []
        self._first = self._rest = Handle((), comm)
        if comm.is_alone:
            return
        own, rest = _framed(payload, _GATHERED_BYTES), payload[_GATHERED_BYTES - _LENGTH.size :]
        if self._gathered is not None:
            self._every = [torch.empty_like(own) for _ in range(comm.size)]
        with in_backend(comm):
            work = torch_dist.gather(own, self._every or None, group_dst=dst, group=control_group(comm), async_op=True)
        self._first = Handle((work,), comm)
        if rest and self._gathered is None:
            rest_of_own = torch.frombuffer(bytearray(rest), dtype=torch.uint8)
            self._rest = transfer_between_hosts([], [(rest_of_own, dst)], comm, _GATHER_TAG)

    def is_completed(self) -> bool:
        """Return whether `wait` would not block, but for what did not fit into the first message."""
        return self._first.is_completed()

    def wait(self) -> list[bytes] | None:
        """Return every rank's bytes on `dst`, in rank order; None elsewhere, when this rank has sent its own.

        **Raises**: PeerError if a rank is gone; CollectiveTimeoutError if one did not arrive in time.
        """
        self._first.wait()
        self._rest.wait()
        slots, self._every = list(map(bytes_of, self._every)), []
        lengths = [_LENGTH.unpack_from(slot)[0] for slot in slots]
        room = _GATHERED_BYTES - _LENGTH.size
        rests = [torch.empty(max(length - room, 0), dtype=torch.uint8, device=_CPU) for length in lengths]
        receiving = [(rest, rank) for rank, rest in enumerate(rests) if rank != self._comm.rank]
        transfer_between_hosts(receiving, [], self._comm, _GATHER_TAG).wait()
        if self._gathered is not None:
            for rank, (slot, length, rest) in enumerate(zip(slots, lengths, rests, strict=True)):
                if rank != self._comm.rank:
                    self._gathered[rank] = bytes(slot[_LENGTH.size :][:length]) + bytes(bytes_of(rest))
        return self._gathered
