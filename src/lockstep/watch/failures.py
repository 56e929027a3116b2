"""The errors of calls that fail: which ranks make other calls, are gone, or did not arrive in time."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from lockstep.calls import Failure
from lockstep.errors import (
    PEER_IS_GONE,
    CollectiveTimeoutError,
    DistError,
    PeerError,
    caused_by,
    message_of,
    ranks_in_words,
)
from lockstep.groups import Comm, known_groups, resolve
from lockstep.watch.watch import current_watch, interrupt
from lockstep.watch.words import Absent, lines_of

_SECONDS_TO_FIND = 1.9  # those that are asked have a little less
# The backends' messages (torch 2.13) for a connection that timed out.
_SILENT = ("Timed out", "timed out", "timeout", "Timeout")
# A rank that ended with one of these did so because of another one.
_OF_OTHERS = (f"{PeerError.__name__}:", f"{CollectiveTimeoutError.__name__}:")


def mismatch(comm: Comm, *, all_know: bool = False) -> DistError:
    """Return the error for ranks that have made different calls in a group; it shows the first that differs.

    Args:
        comm: the group.
        all_know: all of its ranks are here, so that the group can be used further. Otherwise the others are told.
    """
    calls = comm.calls
    assert calls is not None
    if calls.failure is None:
        failure = Failure(f"ranks of {comm.name} must make the same calls, but their calls differ ({comm.this_rank})")
        watch = current_watch()
        if watch is not None:
            with suppress(Exception):
                failure = watch.explain(comm, calls, wait=all_know)
                if not all_know:
                    watch.declare(comm, failure)
        if all_know:
            calls.reset()
            return failure.error()
        calls.failure = failure
    calls.has_failed = True
    return calls.failure.error()


def translate_error(error: RuntimeError, comm: Comm, *, is_of_torch: bool = False) -> Exception:
    """Return lockstep's error for a backend's error: it names the ranks that are gone, or did not arrive.

    Args:
        error: what the backend has raised.
        comm: the group.
        is_of_torch: it was raised in a collective that torch has called, as in DDP's backward pass.
    """
    text, calls = message_of(error), comm.calls
    if isinstance(error, DistError):
        return error
    is_gone = any(words in text for words in PEER_IS_GONE)
    is_silent = any(words in text for words in _SILENT)
    if calls is not None:
        calls.has_failed = True
        if calls.failure is not None:
            return calls.failure.error()
    if not is_gone and not is_silent:
        return DistError(f"{text} ({comm.this_rank})")
    absent = _absent(comm)
    if calls is not None and calls.failure is not None:
        return calls.failure.error()
    if any(one.has_ended for one in absent) or (is_gone and not absent):
        ended = [one for one in absent if one.has_ended]
        first = [one for one in ended if not one.cause.startswith(_OF_OTHERS)]
        return _peer_error(comm, text, first or ended, is_of_torch)
    return _timeout_error(comm, f"The backend says: {text}", absent, is_of_torch)


def timeout_error(comm: Comm, detail: str) -> CollectiveTimeoutError:
    """Return the error for ranks that did not arrive in time; it names them."""
    return _timeout_error(comm, detail, _absent(comm))


def _absent(comm: Comm) -> list[Absent]:
    watch, calls = current_watch(), comm.calls
    if watch is None or calls is None or watch.is_cut_off:
        return []
    watch.looks_for_others = True
    found: list[Absent] = []

    def find() -> None:
        with suppress(Exception):  # the store may be gone
            found.extend(watch.find_absent(comm, calls))

    # Where the network is gone, the store does not answer, for a quarter of an hour.
    finding = threading.Thread(target=find, name="lockstep-find-absent", daemon=True)
    finding.start()
    finding.join(_SECONDS_TO_FIND)
    watch.is_cut_off = finding.is_alive()
    return [] if watch.is_cut_off else found


def _what(comm: Comm, is_of_torch: bool = False) -> str:
    """Return in words what has failed: the last call, or what torch has called after it."""
    calls = comm.calls
    of_torch = "a collective of torch's own" if is_of_torch else "a collective"
    if calls is None or not calls.number:
        return of_torch
    last = f"call {calls.number}, {calls.call(calls.number)},"
    return f"{of_torch} after {last}" if is_of_torch else last


def _timeout_error(
    comm: Comm, detail: str, absent: Sequence[Absent], is_of_torch: bool = False
) -> CollectiveTimeoutError:
    what = _what(comm, is_of_torch)
    if absent:
        error = CollectiveTimeoutError(
            f"{ranks_in_words([one.rank for one in absent])} of {comm.name} did not take part in {what} in time "
            f"({comm.this_rank}):\n{lines_of(absent)}"
        )
        return caused_by(error, [comm.ranks[one.rank] for one in absent])
    watch = current_watch()
    if watch is not None and watch.is_cut_off:
        return CollectiveTimeoutError(
            f"a rank of {comm.name} did not take part in {what} in time, nor does the store answer at which the ranks "
            f"met ({comm.this_rank}): this host may have lost its network, or that of rank 0. {detail}"
        )
    return CollectiveTimeoutError(
        f"a rank of {comm.name} did not take part in {what} in time ({comm.this_rank}). Do all ranks call the same "
        f"collectives in the same order? {detail}"
    )


@contextmanager
def backend_errors_translated() -> Iterator[None]:
    """Turn errors of the backend inside, as in DDP's backward, into lockstep's own, which name the ranks."""
    try:
        yield
    except RuntimeError as error:
        text, comm = message_of(error), resolve()
        is_of_peer = any(words in text for words in (*PEER_IS_GONE, *_SILENT))
        if isinstance(error, DistError) or not is_of_peer or comm.size == 1:
            raise
        translated = translate_error(error, comm, is_of_torch=True)
        # What torch has queued would wait for the timeout: here at the end of the process, and on ranks that are no
        # neighbours, in gloo's rings, of the one that is gone.
        for one in known_groups():
            interrupt(one)
        raise translated from error


def _peer_error(comm: Comm, text: str, ended: Sequence[Absent], is_of_torch: bool) -> PeerError:
    if ended:
        error = PeerError(
            f"{ranks_in_words([one.rank for one in ended])} of {comm.name} ended or lost the connection during "
            f"{_what(comm, is_of_torch)} as seen on {comm.this_rank}. Look for the error there first:\n"
            f"{lines_of(ended)}",
            rank=ended[0].rank,
            cause=ended[0].cause or text,
        )
        return caused_by(error, [comm.ranks[one.rank] for one in ended])
    return PeerError(
        f"a rank of {comm.name} ended or lost the connection during {_what(comm, is_of_torch)} as seen on "
        f"{comm.this_rank}. Look for its own error first. The backend says: {text}",
        rank=None,
        cause=text,
    )
