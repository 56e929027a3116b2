"""What processes send through sockets, by C++ and Python alike: counts that a preloaded library keeps in shared memory.

`preloaded` starts a program with that library. In it, each forked process lets its own sends be counted in a row of
`Counts`; the counts of a process that is killed or stopped can be read, too.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
import threading
import time
from pathlib import Path
from typing import NamedTuple

FIELDS = ("requests", "request_bytes", "replies", "reply_bytes", "writes", "write_bytes")
_SOURCE = Path(__file__).with_suffix(".c")
_LIBRARY = _SOURCE.parents[2] / "build" / "sockets.so"
_BACKGROUND = ("lockstep-watch",)  # threads that send without a call of the program
_ROW = 2 * len(FIELDS) + 2  # for the foreground and the background; calls of torch; open files


class Sent(NamedTuple):
    """What one process has sent.

    Attributes:
        requests: writes to the store.
        request_bytes: their bytes.
        replies: writes by the store, which this process serves.
        reply_bytes: their bytes.
        writes: writes to other ranks.
        write_bytes: their bytes.
        calls: collectives of torch's that the main thread has begun.
        files: files that were open.
    """

    requests: int
    request_bytes: int
    replies: int
    reply_bytes: int
    writes: int
    write_bytes: int
    calls: int = 0
    files: int = 0

    @property
    def bytes(self) -> int:
        """All bytes that the process has sent."""
        return self.request_bytes + self.reply_bytes + self.write_bytes


class Counts:
    """Counts of some processes that are forked after this has been made, and moments at which they were noted.

    Args:
        processes: their number.
        moments: number of moments that can be noted.
    """

    def __init__(self, processes: int, moments: int) -> None:
        self.processes, self._moments = processes, moments
        rows = processes * (2 + moments)
        self._shared = mmap.mmap(-1, 8 * rows * _ROW)
        self._values = memoryview(self._shared).cast("q")
        self._begin = ctypes.addressof(ctypes.c_char.from_buffer(self._shared))

    def count(self, process: int, port: int) -> None:
        """Count here what this process sends from now on; the store is at `port`."""
        library = ctypes.CDLL(str(_LIBRARY))
        library.sockets_count(ctypes.c_void_p(self._begin + 8 * self._first(process, 0)), port)
        run = threading.Thread.run

        def run_counted(thread: threading.Thread) -> None:
            if thread.name in _BACKGROUND:
                library.sockets_background()
            run(thread)

        threading.Thread.run = run_counted  # type: ignore[method-assign]

    def add_call(self, process: int) -> None:
        self._values[self._first(process, 0) + _ROW - 2] += 1

    def note(self, process: int, moment: int) -> None:
        """Note what a process has sent by now."""
        own = self._first(process, 0)
        self._values[own + _ROW - 1] = len(os.listdir("/proc/self/fd"))
        place = self._first(process, 1 + moment)
        self._values[place : place + _ROW] = self._values[own : own + _ROW]

    def meet(self, process: int, number: int) -> None:
        """Wait until all have come here: by memory, so that nothing is sent. The last process is the store's."""
        last = 1 + self._moments
        self._values[self._first(process, last)] = number
        while any(self._values[self._first(one, last)] < number for one in range(self.processes - 1)):
            time.sleep(0.005)

    def stamp(self, process: int, what: int) -> None:
        """Note the time of what a process does: something with a number from 1 on."""
        self._values[self._first(process, 1 + self._moments) + what] = time.monotonic_ns()

    def stamped(self, process: int, what: int) -> float:
        """Return the seconds of the clock at which `stamp` was called; 0 if it was not."""
        return self._values[self._first(process, 1 + self._moments) + what] / 1e9

    def between(self, begin: int, end: int | None, *, background: bool) -> list[Sent]:
        """Return what each process has sent from one moment to another one, or until now."""
        return [self._sent(one, begin, end, background) for one in range(self.processes)]

    def _sent(self, process: int, begin: int, end: int | None, background: bool) -> Sent:
        before = self._row(process, 1 + begin)
        after = self._row(process, 0 if end is None else 1 + end)
        size = len(FIELDS)
        grown = [one - other for one, other in zip(after, before, strict=True)]
        found = grown[:size]
        if background:
            found = [one + other for one, other in zip(found, grown[size : 2 * size], strict=True)]
        return Sent(*found, calls=grown[-2], files=after[-1])

    def _row(self, process: int, block: int) -> list[int]:
        first = self._first(process, block)
        return self._values[first : first + _ROW].tolist()

    def _first(self, process: int, block: int) -> int:
        return (block * self.processes + process) * _ROW


def preloaded(words: list[str]) -> int:
    """Run a command in which sends are counted, and return its exit code."""
    _LIBRARY.parent.mkdir(exist_ok=True)
    compiler = os.environ.get("CC", "cc")
    subprocess.run([compiler, "-shared", "-fPIC", "-O2", "-o", _LIBRARY, _SOURCE, "-ldl"], check=True)
    return subprocess.run(words, env={**os.environ, "LD_PRELOAD": str(_LIBRARY)}).returncode
