"""Watches the processes of this node's ranks: how each ended, what it reported, and which signals it was sent.

Each rank leads a session of its own; its data loader workers and other subprocesses belong to that session, unless they
leave it.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from lockstep.launch.ledger import RankRecord, Report
from lockstep.launch.sessions import end_sessions, state_of
from lockstep.launch.worker import STACK_SIGNAL, read_iteration, stack_file

_PROC = Path("/proc")
_CGROUPS = Path("/sys/fs/cgroup")
_POLL_SECONDS = 0.02
_SECONDS_FOR_STACK = 0.5
# A rank computes if it uses at least `_BUSY_SHARE` of one core. Samples over less than `_MIN_SECONDS` do not count.
_MIN_SECONDS = 0.5
_BUSY_SHARE = 0.05
_SECONDS_FOR_WATCHER = 0.5
_FRAMES_OF_START = ("<frozen runpy>", f"{os.sep}launch{os.sep}worker.py")


class RankProcesses:
    """The ranks of this node, in one attempt.

    Args:
        records: an entry for each rank, which is kept up to date.
    """

    def __init__(self, records: Sequence[RankRecord]) -> None:
        self.records = records
        self._is_closed = False
        # A thread for each rank: when ranks end decides which failed first, and must not depend on polling.
        self._watchers = [threading.Thread(target=_watch, args=(record,), daemon=True) for record in self.records]
        for watcher in self._watchers:
            watcher.start()

    def poll(self) -> None:
        """Read what the ranks have reported; where one has failed, also the states of the others."""
        for record in self.records:
            _note_end(record)
            if record.report is None:
                record.report = Report.read(record.error_file)
        if any(record.has_failed for record in self.records):
            for record in self.records:
                if record.is_silent and record.status is None and not record.was_signalled:
                    _note_state(record)

    def iteration_of(self, rank: int) -> int | None:
        """Return how many iterations a rank has completed, or None if it has not said so."""
        (file,) = (record.error_file for record in self.records if record.rank == rank)
        return read_iteration(iteration_file(file))

    @property
    def has_trained(self) -> bool:
        """Whether any rank has completed an iteration."""
        return any(read_iteration(iteration_file(record.error_file)) for record in self.records)

    def collect_stacks(self) -> None:
        """Ask the ranks that have reported no error for their stacks, and wait for half a second at most."""
        silent = [(record, stack_file(record.error_file)) for record in self.records if record.is_silent]
        asked = [(record, file) for record, file in silent if file.exists()]
        if STACK_SIGNAL is None or not asked:
            return
        for record, _ in asked:
            record.signalled = time.time()  # a stopped rank that SIGCONT wakes may fail now, but was not the cause
            with suppress(ProcessLookupError):
                os.kill(record.pid, STACK_SIGNAL)
                os.kill(record.pid, signal.SIGCONT)
        deadline = time.monotonic() + _SECONDS_FOR_STACK
        while time.monotonic() < deadline and not all(file.stat().st_size for _, file in asked):
            time.sleep(_POLL_SECONDS)
        for record, file in asked:
            record.stack = _script_frames(file.read_text(errors="replace"))

    def send(self, number: signal.Signals, *, include_reported: bool = True) -> None:
        """Send a signal to the sessions of all ranks that run; wake stopped ones by SIGCONT, so that they handle it.

        Args:
            number: the signal.
            include_reported: also to those that have reported an error, and are about to end.
        """
        for record in self.records:
            _note_end(record)
            if record.status is not None or (not include_reported and record.report is not None):
                continue
            record.signalled = min(record.signalled, time.time())
            record.signals.append(number)
            with suppress(ProcessLookupError, PermissionError):  # it has ended meanwhile
                os.killpg(record.pid, number)
                os.killpg(record.pid, signal.SIGCONT)

    def wait(self, seconds: float, *, include_reported: bool = True) -> bool:
        """Wait until all ranks have ended, and return whether they have.

        Args:
            seconds: how long to wait.
            include_reported: also for those that have reported an error.
        """
        deadline = time.monotonic() + seconds
        while running := [record for record in self.records if record.status is None]:
            only_reported = all(record.report is not None for record in running)
            if time.monotonic() > deadline or (only_reported and not include_reported):
                return False
            time.sleep(_POLL_SECONDS)
            for record in running:
                _note_end(record)
        return True

    def close(self, seconds: float) -> None:
        """End what is left of the ranks' sessions, after all ranks have ended.

        Args:
            seconds: the grace period between SIGTERM and SIGKILL.
        """
        if not self._is_closed:
            end_sessions({record.pid for record in self.records}, seconds)
        self._is_closed = True
        for watcher in self._watchers:
            watcher.join(_SECONDS_FOR_WATCHER)


def iteration_file(error_file: str) -> Path:
    """Return the file to which a rank writes how far it has come, beside the one for its error."""
    return Path(error_file).with_name("iteration")


def _watch(record: RankRecord) -> None:
    """Note the moment at which a rank ends."""
    with suppress(ChildProcessError):
        os.waitid(os.P_PID, record.pid, os.WEXITED | os.WNOWAIT)
    _note_end(record)


def _note_end(record: RankRecord) -> None:
    """Note whether a rank has ended, without reaping it."""
    if record.status is not None:
        return
    try:
        ended = os.waitid(os.P_PID, record.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # Somebody has reaped it. 0, because only another code or a report counts as failure.
        record.ended, record.status = time.time(), 0
        return
    if ended is not None:
        record.ended = record.ended or time.time()
        record.status = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status


def _note_state(record: RankRecord) -> None:
    """Note whether a rank that runs is stopped, computes, or waits.

    One sample is not enough: a busy rank may just be waiting for a thread or a core. So its CPU time over half a
    second decides.
    """
    now = time.monotonic()
    record.state, used = state_of(record.pid)
    if record.first_look is None:
        record.first_look = now, used
    seconds, before = now - record.first_look[0], record.first_look[1]
    if record.state in ("R", "S") and seconds > _MIN_SECONDS:
        record.state = "R" if used - before > _BUSY_SHARE * seconds else "S"


def _script_frames(stack: str) -> str:
    """Return the frames of a stack by `faulthandler` without those that start the script."""
    lines = [line for line in stack.splitlines() if line.startswith("  File ")]
    return "\n".join(line for line in lines if not any(words in line for words in _FRAMES_OF_START))


class OomKills:
    """Counts the processes that the kernel has killed for lack of memory since its creation."""

    def __init__(self) -> None:
        self._before = _oom_kill_counts()

    def describe(self) -> str:
        """Return what is known about the cause of a SIGKILL that the launcher did not send."""
        kills = [count - self._before[path] for path, count in _oom_kill_counts().items() if path in self._before]
        if not kills:
            return "The launcher did not send it. Where nobody else did, the machine may have run out of memory."
        if max(kills) > 0:
            return (
                f"The machine, or the job's share of it, ran out of memory: the kernel has killed {max(kills)} of its "
                "processes meanwhile. Try a smaller batch, fewer data loader workers, or more memory."
            )
        return "The launcher did not send it, nor did the kernel for lack of memory: somebody else did."


def _oom_kill_counts() -> dict[Path, int]:
    """Return how often the kernel has killed for lack of memory: in this control group, and on the machine."""
    found = {}
    for path in (_PROC / "vmstat", *_cgroup_files()):
        with suppress(OSError, ValueError, StopIteration):
            lines = path.read_text().splitlines()
            found[path] = next(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))
    return found


def _cgroup_files() -> list[Path]:
    """Return the files that count the kills in this process's control group, of version 1 or 2."""
    with suppress(OSError):
        for line in (_PROC / "self" / "cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            below = path.lstrip("/")
            if controllers == "memory":
                return [_CGROUPS / "memory" / below / "memory.oom_control"]
            if not controllers and (_CGROUPS / below / "memory.events").exists():
                return [_CGROUPS / below / "memory.events"]
    return []
