"""Collectives in flight, and how a rank waits for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from time import monotonic
from typing import Any

import torch
from torch.distributed import Work
from torch.futures import Future, collect_all

from lockstep.errors import CollectiveMismatchError, DistError
from lockstep.groups import Comm
from lockstep.watch.failures import translate_error


class Handle:
    """A collective in flight. `wait` completes it, including the copy back to the caller's device and dtype.

    On an accelerator, `wait` orders the device's current stream after the collective, as torch's `Work` does; the host
    goes on, unless there is a `timeout`, with which NCCL blocks it until the result is there. torch's functions return
    None for a synchronous call, after which they have done so themselves (2.13).
    """

    __slots__ = ("_comm", "_finish", "_works")

    def __init__(
        self, works: Sequence[Work | Handle | None], comm: Comm, finish: Callable[[], None] | None = None
    ) -> None:
        self._works: tuple[Work | Handle, ...] = tuple([work for work in works if work is not None])
        self._comm, self._finish = comm, finish

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until the result is available; further calls return at once, or raise again.

        Args:
            timeout: for each message; None is the group's own. Given one, NCCL blocks the host.

        **Raises**: PeerError if a rank is gone; CollectiveTimeoutError if a rank did not arrive in time; ValueError if
        the mean of integers is not a whole number.
        """
        for work in self._works:
            if isinstance(work, Handle):
                work.wait(timeout)
                continue
            with in_backend(self._comm):
                work.wait() if timeout is None else work.wait(timeout)
        self._works = ()
        if self._finish is not None:
            self._finish()
        self._finish = None
        return True

    def is_completed(self) -> bool:
        """Return whether `wait` would not block; a send or receive over gloo returns False until `wait` was called."""
        return all(work.is_completed() for work in self._works)

    def get_future(self) -> Future[Any]:
        """Return a future that completes with the communication, torch's own if that is one call.

        Its value means nothing. The result is in its place, in the caller's dtype and on its device, after `wait`.

        **Raises**: RuntimeError, by torch, for sends and receives over gloo.
        """
        futures = [work.get_future() for work in self._works]
        return futures[0] if len(futures) == 1 else collect_all(futures)


def wait_unless_async(handle: Handle, async_op: bool) -> Handle | None:
    """Return the handle if `async_op`, else wait for it and return None."""
    if async_op:
        return handle
    handle.wait()
    return None


class waiting:  # noqa: N801 - a context manager; as a generator it would take twice as long
    """Let the watch know that this rank may wait in the newest call of a group, though it may wait for an older one."""

    __slots__ = ("_before", "_comm")

    def __init__(self, comm: Comm) -> None:
        self._comm = comm

    def __enter__(self) -> None:
        calls = self._comm.calls
        if calls is not None:
            self._before = calls.since, calls.waiting
            calls.since, calls.waiting = monotonic(), calls.number

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        calls = self._comm.calls
        if calls is not None:
            calls.since, calls.waiting = self._before


class in_backend(waiting):  # noqa: N801
    """Do what `waiting` does, around calls of the backend; its errors become lockstep's, which name ranks."""

    __slots__ = ()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Raise lockstep's error for one of the backend."""
        try:
            if isinstance(error, RuntimeError) and not isinstance(error, DistError):
                translated = translate_error(error, self._comm)
                if translated is error:
                    return
                # Of a mismatch, the backend's error only comes from the way in which the watch has ended the wait.
                cause = None if isinstance(translated, CollectiveMismatchError) else error
                raise translated from cause
        finally:
            super().__exit__(kind, error, trace)


def start(
    collective: Callable[..., Any], comm: Comm, device: torch.device, *arguments: object, **options: object
) -> Any:
    """Run one of torch's collectives in a group, and return what it returns: a `Work` or None.

    Args:
        collective: a function of `torch.distributed`.
        comm: the group.
        device: of the tensors.
        *arguments: of the function.
        **options: of the function, without the group.
    """
    with in_backend(comm):
        work = collective(*arguments, group=comm.pg, **options)
    note_running(comm, device, work)
    return work


def note_running(comm: Comm, device: torch.device, work: Work | None = None) -> None:
    """Let the watch know of what runs in a group without the host: an asynchronous call, or work of a device.

    **Cost**: on an accelerator, for a call that gave no `Work`, one event on its current stream; no wait.
    """
    calls = comm.calls
    if calls is None or comm.size == 1 or (work is None and device.type == "cpu"):
        return
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return  # events that are recorded in a CUDA graph can't be queried
    last: Work | torch.Event | None = work
    if last is None:
        stream = torch.accelerator.current_stream(device)
        if calls.event is None or calls.event.device != stream.device:
            calls.event = torch.Event(stream.device)
        calls.event.record(stream)
        last = calls.event
    if device.type != "cpu":
        calls.device_index = torch.accelerator.current_device_index() if device.index is None else device.index
    calls.running = (calls.number, monotonic(), last)
