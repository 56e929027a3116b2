"""Ends what ranks have started and left behind: the processes of their sessions, and shared memory.

Run as a program, this file is the guard of a launcher: it ends the sessions of the ranks, and removes the launcher's
folder, if the launcher is killed before it could. It therefore imports nothing of lockstep.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path

_PROC = Path("/proc")
_SHARED_MEMORY = Path("/dev/shm")
_POLL_SECONDS = 0.02
_SECONDS_TO_DIE = 5.0


class Guard:
    """A small process that cleans up after this one if it is killed. A context manager.

    Args:
        folder: a folder to remove then.
    """

    def __init__(self, folder: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__],
            cwd="/",
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,  # Ctrl-C does not reach it
        )
        self._send("folder", folder)

    def __enter__(self) -> Guard:
        return self

    def __exit__(self, *_: object) -> None:
        self._send("done")
        self._process.communicate()

    def watch(self, sessions: Iterable[int]) -> None:
        """Let the guard end these sessions, in place of those that it was told before."""
        self._send("sessions", *map(str, sessions))

    def _send(self, *words: str) -> None:
        assert self._process.stdin is not None
        with suppress(OSError):  # somebody has killed it
            self._process.stdin.write("\0".join(words) + "\n")
            self._process.stdin.flush()


def state_of(pid: int) -> tuple[str, float]:
    """Return the letter of a process's state in /proc, such as "T" if it is stopped, and its processor time in seconds.

    They are "" and 0 if they are not known.
    """
    fields = _stat(pid)
    return fields[0], sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")  # utime, stime


def members(sessions: Collection[int]) -> list[int]:
    """Return the processes of these sessions that have not ended (Linux)."""
    if sys.platform != "linux":
        return []
    fields = {int(entry): _stat(int(entry)) for entry in os.listdir(_PROC) if entry.isdecimal()}
    return [
        pid
        for pid, (state, _, _, session, *_) in fields.items()
        if int(session) in sessions and state not in ("", "Z", "X")
    ]


def end_sessions(sessions: Collection[int], seconds: float) -> None:
    """End all processes of these sessions, and remove the shared memory that they leave.

    Args:
        sessions: numbers of the sessions: the processes that began them.
        seconds: how long they may take to end at SIGTERM, before they are killed.
    """
    ended = set(sessions)
    # SIGTERM is sent twice, because data loader workers of the Runner ignore the first one.
    half = seconds / 2
    for number, patience in ((signal.SIGTERM, half), (signal.SIGTERM, half), (signal.SIGKILL, _SECONDS_TO_DIE)):
        deadline = time.monotonic() + patience
        signalled: set[int] = set()
        while left := members(sessions):
            ended.update(left)
            for pid in set(left) - signalled:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, number)
                    os.kill(pid, signal.SIGCONT)
            signalled.update(left)
            if time.monotonic() > deadline:
                break
            time.sleep(_POLL_SECONDS)
    remove_shared_memory(ended)


def remove_shared_memory(pids: Collection[int]) -> None:
    """Remove files in /dev/shm by which these processes, which have ended, passed tensors to others."""
    with suppress(OSError):
        for path in _SHARED_MEMORY.glob("torch_*"):
            owner = path.name.split("_")[1]
            if owner.isdecimal() and int(owner) in pids:
                with suppress(OSError):
                    path.unlink()


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the state on (state, parent, group, session); "" and 0 if it is gone."""
    with suppress(OSError):
        return (_PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
    return ["", "0", "0", "0"]


def _guard() -> None:
    """Read from stdin what to clean up, and do so if stdin ends without "done": the launcher was killed."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # a scheduler or a terminal may send them to all processes of a job
    folder, sessions = "", set[int]()
    for line in sys.stdin:
        what, *words = line.rstrip("\n").split("\0")
        if what == "done":
            return
        if what == "folder":
            folder = words[0]
        else:
            sessions = {int(word) for word in words}
    end_sessions(sessions, seconds=1.0)
    if folder:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    _guard()
