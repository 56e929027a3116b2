"""Waiting for what is in flight, and saying in lockstep's words what went wrong on the way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from threading import Thread

from torch.distributed import Work

from lockstep.dist.groups import Group
from lockstep.errors import CollectiveTimeoutError, DistError, PeerError

# gloo's words (torch 2.13) for a connection whose other end went away, and for one that stays silent.
_GONE = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")
_SILENT = ("Timed out", "timed out", "timeout")


class Handle:
    """A collective in flight. `wait` completes it, the moving back to the caller's device and dtype included."""

    __slots__ = ("_finish", "_group", "_pending")

    def __init__(
        self, pending: Sequence[Work | Handle], group: Group, finish: Callable[[], None] | None = None
    ) -> None:
        self._pending: tuple[Work | Handle, ...] = tuple(pending)
        self._group = group
        self._finish = finish

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until the result is there; further calls return at once, or raise again.

        **Raises**: PeerError where a rank went away; CollectiveTimeoutError where one did not come in time;
        ValueError where the mean of integers is no whole number.
        """
        for one in self._pending:
            if isinstance(one, Handle):
                one.wait(timeout)
            else:
                wait_for(one, self._group, timeout)
        self._pending = ()
        if self._finish is not None:
            self._finish()
        self._finish = None
        return True

    def is_completed(self) -> bool:
        """Return whether `wait` would not block."""
        return all(one.is_completed() for one in self._pending)


class PairsHandle(Handle):
    """Sends and receives in flight, of which gloo does not say whether they are completed (torch 2.13).

    Where somebody asks, a thread waits for them.
    """

    __slots__ = ("_outcome",)

    def __init__(self, pending: Sequence[Work], group: Group) -> None:
        super().__init__(pending, group)
        self._outcome: Future[bool] | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until all are completed; see `Handle.wait`."""
        if self._outcome is None:
            return super().wait(timeout)
        try:
            return self._outcome.result(None if timeout is None else timeout.total_seconds())
        except TimeoutError as error:
            raise _too_late(self._group, f"{timeout} are over") from error

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


def settled(handle: Handle, async_op: bool) -> Handle | None:
    """Return the handle to a caller who wants to wait himself, else wait."""
    if async_op:
        return handle
    handle.wait()
    return None


def wait_all(handles: Sequence[Handle]) -> None:
    """Wait for every one of `handles`."""
    for handle in handles:
        handle.wait()


def wait_for(work: Work, group: Group, timeout: timedelta | None = None) -> None:
    """Wait for one piece of work; see `Handle.wait` for what it raises."""
    try:
        if timeout is None:
            work.wait()
        else:
            work.wait(timeout)
    except RuntimeError as error:
        raise translated(error, group) from error


def translated(error: RuntimeError, group: Group) -> Exception:
    """Return what a backend's error means; `error` itself where nothing better is known."""
    text = str(error)
    if any(words in text for words in _GONE):
        return PeerError(
            f"a rank of the group ended or lost its connection during a collective ({group.here}). "
            f"Look for its own error first. The backend says: {text}",
            rank=None,
            cause=text,
        )
    if any(words in text for words in _SILENT):
        return _too_late(group, f"The backend says: {text}")
    return error if isinstance(error, DistError) else DistError(f"{text} ({group.here})")


def _too_late(group: Group, detail: str) -> CollectiveTimeoutError:
    return CollectiveTimeoutError(
        f"a rank of the group did not take part in a collective in time ({group.here}). Do all ranks call the same "
        f"collectives in the same order? {detail}"
    )
