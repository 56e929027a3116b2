"""Handles: collectives in flight, and how a rank waits for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import timedelta
from threading import Thread, get_ident
from time import monotonic

import torch
from torch.distributed import Work

from lockstep.errors import CollectiveMismatchError
from lockstep.groups import Comm
from lockstep.watch.failures import timeout_error, translate_error

_MOST_IN_FLIGHT = 128
_helpers: set[int] = set()  # threads that wait for handles; what a rank waits for is a matter of its own threads


class Handle:
    """A collective in flight. `wait` completes it, including the copy back to the caller's device and dtype.

    For a synchronous call a backend may return None instead of `Work`, as NCCL and XCCL do (torch 2.8): nothing is left
    to wait for, because the call is in order on the device's current stream.
    """

    __slots__ = ("_comm", "_finish", "_pending")

    def __init__(
        self, pending: Sequence[Work | Handle | None], comm: Comm, finish: Callable[[], None] | None = None
    ) -> None:
        self._pending: tuple[Work | Handle, ...] = tuple([one for one in pending if one is not None])
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
                wait_for((one,), self._comm, timeout)
        self._pending = ()
        if self._finish is not None:
            self._finish()
        self._finish = None
        return True

    def is_completed(self) -> bool:
        """Return whether `wait` would not block."""
        return all(one.is_completed() for one in self._pending)

    def leave_alone(self) -> None:
        """Let it complete without `wait`, if other ranks need this one to complete theirs; the caller may wait late."""
        for one in self._pending:
            if isinstance(one, Handle):
                one.leave_alone()


class PairwiseHandle(Handle):
    """Sends and receives in flight. gloo can't tell whether they are completed (torch 2.13).

    The first call of `is_completed` starts a thread that waits for them.
    """

    __slots__ = ("_outcome",)

    def __init__(self, pending: Sequence[Work], comm: Comm, finish: Callable[[], None] | None = None) -> None:
        super().__init__(pending, comm, finish)
        self._outcome: Future[bool] | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until all are completed; see `Handle.wait`."""
        if timeout is not None:
            self.is_completed()  # a receive that times out itself closes all connections of the group (gloo)
        if self._outcome is None:
            return self._complete()
        with waiting(self._comm):
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
            mode = torch.is_inference_mode_enabled()  # of this thread: the tensors are of its kind
            Thread(target=self._complete_for, args=(self._outcome, mode), daemon=True).start()
        return self._outcome.done()

    def _complete(self) -> bool:
        return super().wait()

    def _complete_for(self, outcome: Future[bool], inference_mode: bool) -> None:
        thread = get_ident()
        _helpers.add(thread)
        try:
            with torch.inference_mode(inference_mode):
                outcome.set_result(self._complete())
        except Exception as error:
            outcome.set_exception(error)
        finally:
            _helpers.discard(thread)


class InFlight:
    """Keeps handles of sends and receives: gloo needs their memory also where the caller has dropped the handle."""

    def __init__(self) -> None:
        self._handles: dict[Handle, None] = {}

    def started(self, works: Sequence[Work], comm: Comm, finish: Callable[[], None] | None = None) -> Handle:
        """Return a handle, which is kept until its end."""

        def end() -> None:
            try:
                if finish is not None:
                    finish()
            finally:
                self.drop(handle)

        handle = PairwiseHandle(works, comm, end)
        self.keep(handle)
        return handle

    def keep(self, handle: Handle) -> None:
        """Keep a handle until `drop`."""
        if len(self._handles) >= _MOST_IN_FLIGHT:
            for oldest in list(self._handles)[:1]:  # a copy: threads drop handles, too
                oldest.wait()
        self._handles[handle] = None

    def drop(self, handle: Handle) -> None:
        """Keep a handle no more."""
        self._handles.pop(handle, None)


def wait_unless_async(handle: Handle, async_op: bool) -> Handle | None:
    """Return the handle if `async_op`, else wait for it and return None."""
    if async_op:
        handle.leave_alone()
        return handle
    handle.wait()
    return None


@contextmanager
def waiting(comm: Comm) -> Iterator[None]:
    """Let the watch know that this rank waits, as `wait_for` does."""
    calls = comm.calls
    if calls is not None:
        calls.since, calls.waiting = monotonic(), calls.number
    try:
        yield
    finally:
        if calls is not None:
            calls.waiting = 0


def wait_for(works: Sequence[Work | None], comm: Comm, timeout: timedelta | None = None) -> None:
    """Wait for pieces of work, of which some may be None, as in `Handle`; see `Handle.wait` for what it raises."""
    calls = None if get_ident() in _helpers else comm.calls
    if calls is not None:
        calls.since, calls.waiting = monotonic(), calls.number
    try:
        for work in works:
            if work is None:
                continue
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
