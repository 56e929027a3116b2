"""Compares the calls of all ranks for the last time when a job ends, so that none succeeds with unequal calls."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import suppress

from lockstep.errors import CollectiveMismatchError, DistError, error_in_words
from lockstep.groups import recorded_groups
from lockstep.watch.board import Board, pauses
from lockstep.watch.diagnosis import described_if_different, records_of
from lockstep.watch.interrupt import interrupt_all
from lockstep.watch.watch import Watch, take_watch

_SECONDS_TO_END = 2.0  # and three ticks: a rank that waits in a call hears meanwhile that this one has ended
_SECONDS_TO_LINGER = 2.0
_SECONDS_OF_DEVICES = 0.5  # after which torch knows that the backend of a device has lost a rank
_FAILED = "failed"  # the result where a rank has ended with an error
_COMPARING_RANK = 0  # compares the calls of all ranks, and sends the others the result


def end_watch() -> DistError | None:
    """End the watch; return the error that says why the calls of the ranks don't agree, if they don't.

    Waits up to two seconds, and three ticks of the board, for the other ranks, unless this one ends because of an
    error. Then rank 0 waits two seconds at most for those that read the result.
    """
    watch = take_watch()
    if watch is None:
        return None
    try:
        if not watch.is_cut_off:
            with suppress(Exception):  # the store may be gone
                return _compare_for_the_last_time(watch)
        if raised_error() is None:
            return _failure_of_devices(watch)
        interrupt_all()
        return None
    finally:
        watch.stop()


def raised_error() -> BaseException | None:
    """Return the error with which this process ends, or that is being handled; not an exit with success.

    At a prompt, as in a notebook, the last error does not end the process.
    """
    error = sys.exception() or (None if hasattr(sys, "ps1") else getattr(sys, "last_value", None))
    return None if isinstance(error, SystemExit) and error.code in (None, 0) else error


def _failure_of_devices(watch: Watch) -> DistError | None:
    """Return the error of calls on devices that a rank which is gone has left, if this rank has not raised it.

    torch knows it a tenth of a second after the rank is gone; the wait is five times as long. Calls on the host raise
    by themselves.
    """
    groups = recorded_groups()
    for _ in pauses(_SECONDS_OF_DEVICES if any(comm.devices - {"cpu"} for comm, _ in groups) else 0.0, 0.1):
        watch.look_at_devices()
        for _, calls in groups:
            if calls.failure is not None and not calls.has_failed:
                return calls.failure
    return None


def _compare_for_the_last_time(watch: Watch) -> DistError | None:
    """Publish the calls of this rank, before it ends, and return how those of all ranks differ, if they do."""
    groups, error = recorded_groups(), raised_error()
    if error is not None:
        watch.error = error_in_words(error).partition("\n")[0]
    failure = watch.hear() if error is not None else _failure(watch)
    has_failed = error is not None or any(calls.has_failed for _, calls in groups)
    watch.stop()
    watch.board.end({**watch.state(ended=True), "failed": has_failed or failure is not None})
    if error is not None:
        interrupt_all()
    try:
        if has_failed or failure is not None:
            return None if has_failed else failure
        if watch.rank == _COMPARING_RANK:
            return _compare_all(watch)
        return _read_result(watch) if groups else None
    finally:
        watch.store.add("left", 1)
        if watch.rank == _COMPARING_RANK:
            _wait_for_readers(watch.board)


def _wait_for_readers(board: Board) -> None:
    """Wait until the others have read the result: the store may end with this process."""
    for _ in pauses(_SECONDS_TO_LINGER, board.tick):
        others = range(1, board.size)
        if board.store.add("left", 0) == board.size or all(board.process(rank) == "gone" for rank in others):
            return


def _read_result(watch: Watch) -> DistError | None:
    """Return the result that `_COMPARING_RANK` publishes, or a failure that is declared before."""
    store = watch.store
    failure = _wait(watch, _SECONDS_TO_END + 0.5, lambda: [] if store.check(["result"]) else [_COMPARING_RANK])
    result = json.loads(store.get("result")) if failure is None and store.check(["result"]) else None
    if result == _FAILED:
        return _failure_of_devices(watch)
    return CollectiveMismatchError(result[0], failed_ranks=result[1]) if result else failure


def _compare_all(watch: Watch) -> DistError | None:
    """Compare the calls of all ranks, and publish the result.

    A failure that another rank has declared is not published again, because each rank reads it by itself.
    """
    groups, heard, difference = recorded_groups(), None, None
    result: object = None
    try:
        heard = _wait(watch, _SECONDS_TO_END, watch.board.missing) if groups else None
        states = {} if heard else watch.board.last_states(range(1, watch.size))
        if any(state["failed"] for state in states.values()):
            result = _FAILED
        elif not heard:
            states |= {_COMPARING_RANK: watch.state(ended=True)}
            found = (described_if_different(comm, records_of(comm, states)) for comm, _ in groups)
            difference = next((one for one in found if one is not None), None)
            result = difference and [str(difference), difference.failed_ranks]
    finally:
        watch.store.set("result", json.dumps(result))
    return heard or difference or (_failure_of_devices(watch) if result == _FAILED else None)


def _wait(watch: Watch, seconds: float, missing: Callable[[], list[int]]) -> DistError | None:
    """Wait for the ranks that `missing` returns, while their processes live; return a failure that comes first."""
    board = watch.board
    for _ in pauses(seconds + 3 * board.tick, board.tick):
        if (failure := _failure(watch)) is not None:
            return failure
        ranks = missing()
        if not ranks:
            return None
        if board.gone(ranks):
            return _failure_of_devices(watch)
    return None


def _failure(watch: Watch) -> DistError | None:
    """Return why a group can't be used, if this rank has found or heard it."""
    watch.look_at_devices()
    return watch.hear()
