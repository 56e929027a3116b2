"""The errors of calls that fail: which ranks make other calls, are gone, or did not arrive in time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy

import torch

from lockstep.errors import PEER_IS_GONE, DistError, message_of
from lockstep.groups import Comm, GroupLike, failure_of_any, resolve
from lockstep.watch.absent import AbsentSearch
from lockstep.watch.diagnosis import Absent, absence
from lockstep.watch.interrupt import interrupt_all
from lockstep.watch.watch import current_watch

# The backends' messages (torch 2.13) for a connection that timed out, and for a call that was ended from here.
_TIMEOUT_MESSAGES = ("Timed out", "timed out", "timeout", "Timeout")
_ABORT_MESSAGES = ("was aborted",)
# What those of a backend have in common that come up in the user's code, whose own errors may speak of timeouts, too.
_OF_A_BACKEND = ("gloo", "pair closure", "Timed out waiting", "Operation timed out!", "Socket Timeout")


def translate_error(error: RuntimeError, comm: Comm, *, is_called_by_torch: bool = False) -> Exception:
    """Return lockstep's error for a backend's error: it names the ranks that are gone, or did not arrive.

    Args:
        error: what the backend has raised.
        comm: the group.
        is_called_by_torch: it was raised in a collective that torch has called, as in DDP's backward pass.
    """
    text, calls, failure = message_of(error), comm.calls, None
    if calls is not None:
        calls.has_failed = True
        # Why the group can't be used further, or for which group the watch has ended what the backend ran.
        failure = calls.failure or (failure_of_any() if any(words in text for words in _ABORT_MESSAGES) else None)
    if failure is not None:
        return copy(failure)
    if isinstance(error, torch.OutOfMemoryError):  # this rank's own, which callers look for by its class
        return error
    is_gone = any(words in text for words in PEER_IS_GONE)
    if not is_gone and not any(words in text for words in _TIMEOUT_MESSAGES):
        return DistError(f"{text} ({comm.this_rank})")
    watch, absent, is_cut_off = current_watch(), list[Absent](), False
    if watch is not None and calls is not None and comm.group_name:
        absent, is_cut_off = AbsentSearch(watch, comm, calls, calls.number).find(), watch.is_cut_off
    if calls is not None and calls.failure is not None:
        return copy(calls.failure)
    return absence(
        comm, absent, f"The backend says: {text}", cause=text, is_gone=is_gone, is_called_by_torch=is_called_by_torch,
        is_cut_off=is_cut_off,
    )  # fmt: skip


@contextmanager
def backend_errors_translated(group: GroupLike = None) -> Iterator[None]:
    """Turn errors of the backend inside, as in DDP's backward, into lockstep's own, which name the ranks.

    Args:
        group: the one in which torch communicates there; None is the default group.
    """
    try:
        yield
    except RuntimeError as error:
        text, comm = message_of(error), resolve(group)
        is_of_backend = isinstance(error, torch.distributed.DistError) or any(words in text for words in _OF_A_BACKEND)
        timeouts = _TIMEOUT_MESSAGES if is_of_backend else ()
        is_of_peer = any(words in text for words in (*PEER_IS_GONE, *timeouts, *_ABORT_MESSAGES))
        if isinstance(error, DistError) or not is_of_peer or comm.size == 1:
            raise
        translated = translate_error(error, comm, is_called_by_torch=True)
        # torch has queued further calls, which would wait for the timeout: here when the process ends, and on the ranks
        # that gloo's ring does not connect with the one that is gone.
        interrupt_all()
        raise translated from error
