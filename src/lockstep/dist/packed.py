"""An object that goes to one rank while all ranks go on, beside their other calls."""

from __future__ import annotations

import struct
from concurrent.futures import Future
from datetime import timedelta
from threading import Thread, get_ident
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lockstep.dist.pickling import Parts, dump, load_from, places_for, sizes_of
from lockstep.errors import DistError, error_in_words
from lockstep.groups import Comm
from lockstep.transport.control import require_no_failure, transfer_between_hosts
from lockstep.transport.handles import Handle, helpers
from lockstep.transport.moving import bytes_of
from lockstep.watch.failures import timeout_error

_LENGTH = struct.Struct("<q")  # of the message with the sizes of the parts, which comes before the parts themselves
_FIRST_TAG, _REST_TAG = 0x10C5, 0x10C6  # kinds of messages, which keep their order
_unread: list[PendingGather] = []  # whose failure is on its way, while nobody waits for it


class _Unpicklable(NamedTuple):
    """What goes in place of an object that can't be pickled: the reason."""

    reason: str


class PendingGather:
    """The gathering of every rank's object to rank `dst`, in flight: the ranks go on meanwhile.

    Args:
        obj: this rank's object, which must not change until `wait` has returned.
        dst: rank within the group.
        comm: the group.

    **Collective**: every rank. Gatherings to one rank must be waited for in the order in which they were made.

    **Raises**: TypeError on a rank whose object can't be pickled; then `wait` raises PeerError on `dst`.
    """

    def __init__(self, obj: object, dst: int, comm: Comm) -> None:
        self._obj, self._comm = obj, comm
        self._gathered: list[Any] | None = [obj] if comm.rank == dst else None
        self._lengths: dict[int, Tensor] = {}
        self._outcome: Future[list[Any] | None] | None = None
        self._error: DistError | None = None
        self._pending: list[Handle] = []
        if comm.is_alone:
            self._gathered = [obj] * comm.size if comm.rank == dst else None
        elif comm.rank == dst:
            others = [rank for rank in range(comm.size) if rank != dst]
            self._lengths = {rank: torch.empty(_LENGTH.size, dtype=torch.uint8, device="cpu") for rank in others}
            receiving = [(length, rank) for rank, length in self._lengths.items()]
            self._pending = [transfer_between_hosts(receiving, [], comm, _FIRST_TAG)]
        else:
            try:
                self._send(dump(obj, comm), dst)
            except TypeError as error:
                self._send(dump(_Unpicklable(error_in_words(error)), comm), dst)
                _unread.append(self)
                raise

    def wait(self, timeout: timedelta | None = None) -> list[Any] | None:
        """Return on `dst` the objects in rank order, its own unchanged, and None elsewhere; there, this rank has sent.

        **Raises**: as the collectives on objects; CollectiveTimeoutError after `timeout`, by default the group's.
        """
        if timeout is not None or self._outcome is not None:
            return self._wait_in_thread(timeout)
        return self._complete()

    def _complete(self) -> list[Any] | None:
        if self._error is not None:
            raise self._error
        try:
            return self._collected()
        except DistError as error:
            self._error = error
            raise

    def _collected(self) -> list[Any] | None:
        Handle(self._pending, self._comm).wait()
        self._pending = []
        lengths, self._lengths = self._lengths, {}
        if lengths:
            objects = {rank: self._receive(rank, *_LENGTH.unpack(bytes_of(x))) for rank, x in lengths.items()}
            objects[self._comm.rank] = self._obj
            gathered = [objects[rank] for rank in range(self._comm.size)]
            require_no_failure([x.reason if isinstance(x, _Unpicklable) else None for x in gathered], self._comm)
            self._gathered = gathered
        return self._gathered

    def _wait_in_thread(self, timeout: timedelta | None) -> list[Any] | None:
        # A receive that times out itself closes all connections of the group (gloo, torch 2.13).
        if self._outcome is None:
            self._outcome = Future()
            Thread(target=self._wait_for, args=(self._outcome,), daemon=True).start()
        try:
            return self._outcome.result(None if timeout is None else timeout.total_seconds())
        except TimeoutError as error:
            if self._outcome.done():
                raise
            raise timeout_error(self._comm, f"{timeout} are over") from error

    def _wait_for(self, outcome: Future[list[Any] | None]) -> None:
        helpers.add(get_ident())
        try:
            outcome.set_result(self._complete())
        except Exception as error:
            outcome.set_exception(error)
        finally:
            helpers.discard(get_ident())

    def _send(self, parts: Parts, dst: int) -> None:
        sizes = sizes_of(parts)
        length, first = (torch.frombuffer(bytearray(x), dtype=torch.uint8) for x in (_LENGTH.pack(len(sizes)), sizes))
        self._sent = [length, first, *parts]
        rest = [(part, dst) for part in self._sent[1:]]
        self._pending = [
            transfer_between_hosts([], [(length, dst)], self._comm, _FIRST_TAG),
            transfer_between_hosts([], rest, self._comm, _REST_TAG),
        ]

    def _receive(self, rank: int, length: int) -> Any:
        sizes = torch.empty(length, dtype=torch.uint8, device="cpu")
        transfer_between_hosts([(sizes, rank)], [], self._comm, _REST_TAG).wait()
        parts = places_for(bytes(bytes_of(sizes)))
        transfer_between_hosts([(part, rank) for part in parts], [], self._comm, _REST_TAG).wait()
        return load_from(rank, parts, self._comm)
