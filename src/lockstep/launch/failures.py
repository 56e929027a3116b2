"""Finding the rank that failed first, and the message about it."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from lockstep.errors import Preempted
from lockstep.launch.worker import rank_log

# Signals that kill a rank from outside or after a crash. SIGABRT is not among them: it often follows another failure.
_DEADLY = {signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE}


def describe(failures: Mapping[int, ProcessFailure], log_dir: str | Path | None = None) -> str:
    """Return a message: which rank failed first and how, with its traceback, and which other ranks failed.

    Args:
        failures: the failures by rank; not empty.
        log_dir: the folder where ranks write their output, or None.
    """
    first, *others = _by_suspicion(failures)
    failure = failures[first]
    parts = [f"rank {first} {_ending(failure)} (pid {failure.pid})."]
    if _kind(failure) != "SystemExit":  # such a rank has printed its own message
        parts.append(_extra(failure)["py_callstack"].rstrip())
    failed = [f"rank {rank} {_ending(failures[rank])}" for rank in others if not _stopped(failures[rank])]
    if failed:
        parts.append(f"After it: {', '.join(failed)}.")
    if log_dir is not None and failure.local_rank != 0:
        parts.append(f"Its output is in {rank_log(log_dir, first)}.")
    return "\n\n".join(parts)


def first_failed(failures: Mapping[int, ProcessFailure]) -> int:
    """Return the rank that `describe` names first."""
    return _by_suspicion(failures)[0]


def exit_code(failure: ProcessFailure) -> int:
    """Return the exit code of a rank as a shell would: 128 + n after signal n; 1 if it raised an error."""
    if "exitcode" in (extra := _extra(failure)):  # also if the agent stopped the rank before it had ended
        return int(extra["exitcode"])
    return failure.exitcode if failure.exitcode >= 0 else 128 - failure.exitcode


def is_follow_up(failure: ProcessFailure) -> bool:
    """Return whether a rank only reports that another rank failed."""
    return _kind(failure) == "PeerError"


def is_preempted(failure: ProcessFailure) -> bool:
    """Return whether a rank has stopped at a signal, and saved."""
    return _kind(failure) == Preempted.__name__


def _by_suspicion(failures: Mapping[int, ProcessFailure]) -> list[int]:
    return sorted(failures, key=lambda rank: (_suspicion(failures[rank]), rank))


def _suspicion(failure: ProcessFailure) -> tuple[int, float]:
    """Return a sort key that puts the probable cause first: killed, then raised (earliest first), then stopped."""
    extra = _extra(failure)
    if "time" in extra:  # also if the agent had to stop it afterwards
        return (2 if is_follow_up(failure) else 1), float(extra["time"])
    if _stopped(failure):
        return 4, 0.0
    if failure.exitcode < 0:
        return (0 if -failure.exitcode in _DEADLY else 3), 0.0
    return 1, 0.0


def _ending(failure: ProcessFailure) -> str:
    if failure.exitcode < 0 and "type" not in _extra(failure):
        killed = failure.exitcode == -signal.SIGKILL
        hint = "; where nobody sent it, the machine may have run out of memory" if killed else ""
        return f"was ended by {_signal_name(failure)}{hint}"
    kind = _kind(failure)
    return f"exited with code {exit_code(failure)}" if kind == "SystemExit" else f"raised {kind}"


def _kind(failure: ProcessFailure) -> str:
    """Return the type name of the error that ended a rank; "SystemExit" also if no error is known."""
    return str(_extra(failure).get("type", "SystemExit"))


def _stopped(failure: ProcessFailure) -> bool:
    """Return whether the agent stopped this rank because another one had failed."""
    return failure.exitcode in (-signal.SIGTERM, 128 + signal.SIGTERM) and "type" not in _extra(failure)


def _signal_name(failure: ProcessFailure) -> str:
    with suppress(ValueError):
        return signal.Signals(-failure.exitcode).name
    return f"signal {-failure.exitcode}"


def _extra(failure: ProcessFailure) -> dict[str, Any]:
    message = failure.error_file_data.get("message")
    extra = message.get("extraInfo") if isinstance(message, dict) else None
    return extra if isinstance(extra, dict) else {}
