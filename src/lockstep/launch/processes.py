"""Watches the processes of this node's ranks: how each ended, what it reported, and which signals it was sent.

Each rank leads a session of its own; its data loader workers and other subprocesses belong to that session, unless they
leave it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path

from lockstep.launch.ledger import RankRecord, Report
from lockstep.launch.worker import STACK_SIGNAL, stack_file
from lockstep.topology.pid_namespace import stat_of
from lockstep.watch.board import pauses

_POLL_SECONDS = 0.02
_LONGEST_PAUSE = 0.25  # between two looks at what ranks have left behind
_SECONDS_FOR_STACK = 0.5
_SECONDS_FOR_WATCHER = 0.5
_SECONDS_TO_DIE = 5.0
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

    def poll(self, *, states: bool = False) -> None:
        """Read what the ranks have reported; where one has failed, or with `states`, also the states of the others."""
        for record in self.records:
            _note_end(record)
            if record.report is None:
                record.report = Report.read(record.error_file)
        if states or any(record.has_failed for record in self.records):
            for record in self.records:
                if record.is_silent and record.status is None and not record.was_signalled:
                    record.state = next(iter(stat_of(record.pid)), "")

    def collect_stacks(self) -> None:
        """Ask the ranks that have reported no error for their stacks, and wait for half a second at most."""
        silent = [record for record in self.records if record.is_silent and record.status is None]
        files = [(record, stack_file(record.error_file)) for record in silent]
        asked = [(record, file) for record, file in files if file.exists()]
        if STACK_SIGNAL is None or not asked:
            return
        for record, _ in asked:
            # A stopped rank that SIGCONT wakes may fail now, but was not the cause.
            record.signalled = min(record.signalled, time.time())
            with suppress(ProcessLookupError):
                _signal_main_thread(record.pid, STACK_SIGNAL)
                os.kill(record.pid, signal.SIGCONT)
        deadline = time.monotonic() + _SECONDS_FOR_STACK
        sizes, before = [0], list[int]()
        while time.monotonic() < deadline and not (all(sizes) and sizes == before):
            time.sleep(_POLL_SECONDS)
            sizes, before = [file.stat().st_size for _, file in asked], sizes
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
            _end_sessions({record.pid for record in self.records}, seconds)
        self._is_closed = True
        for watcher in self._watchers:
            watcher.join(_SECONDS_FOR_WATCHER)


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


def _members(sessions: Collection[int]) -> list[int]:
    """Return the processes of these sessions that have not ended (Linux)."""
    if sys.platform != "linux":
        return []
    stats = {int(entry): stat_of(int(entry)) for entry in os.listdir("/proc") if entry.isdecimal()}
    return [pid for pid, stat in stats.items() if stat and int(stat[3]) in sessions and stat[0] not in "ZX"]


def _end_sessions(sessions: Collection[int], seconds: float) -> None:
    """End all processes of these sessions.

    Args:
        sessions: numbers of the sessions: the processes that began them.
        seconds: how long they may take to end at SIGTERM, before they are killed.
    """
    # SIGTERM is sent twice, because data loader workers of the Runner ignore the first one.
    half = seconds / 2
    for number, patience in ((signal.SIGTERM, half), (signal.SIGTERM, half), (signal.SIGKILL, _SECONDS_TO_DIE)):
        signalled: set[int] = set()
        for _ in pauses(patience, _LONGEST_PAUSE):  # a look at each process of the machine costs it some time
            if not (left := _members(sessions)):
                return
            for pid in set(left) - signalled:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, number)
                    os.kill(pid, signal.SIGCONT)
            signalled.update(left)


def _signal_main_thread(pid: int, number: int) -> None:
    """Send a signal to the main thread of a process (Linux): of one that is stopped, `kill` lets any thread take it."""
    try:
        send = ctypes.CDLL(None).tgkill  # glibc 2.30
    except AttributeError:
        os.kill(pid, number)
    else:
        send(pid, pid, number)


def _script_frames(stack: str) -> str:
    """Return the frames of what `faulthandler` has written, without those that start the script."""
    lines = [line for line in stack.splitlines() if line.startswith("  File ")]
    return "\n".join(line for line in lines if not any(words in line for words in _FRAMES_OF_START))


def oom_kills() -> int:
    """Return how often the kernel has killed for lack of memory, of the machine or a control group; 0 if not known."""
    with suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/vmstat").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))
    return 0
