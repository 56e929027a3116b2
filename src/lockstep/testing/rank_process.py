"""One rank as the test process sees it: start it, exchange messages, ask for its stack, end it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from io import TextIOWrapper
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path

from lockstep.testing.messages import STACK_SIGNAL, Answer, Request, Seat
from lockstep.testing.reports import RankReport, describe_exit

# Besides the worker with torch: what DDP, FSDP and checkpoints import on first use (1.5 s in every rank), and what test
# modules import. Missing modules are skipped.
_PRELOADED = ["lockstep.testing.worker", "torch._inductor.config", "torch.distributed.checkpoint", "pytest"]
_END_SECONDS = 5.0
_STACK_SECONDS = 2.0
_OUTPUT_BYTES_SHOWN = 64 * 1024
_HERE = str(Path(__file__).parent)


class RankProcess:
    """A process that runs bodies as one rank of a pool."""

    def __init__(self, seat: Seat) -> None:
        self.rank = seat.rank
        self._seat = seat
        self._connection, theirs = multiprocessing.Pipe()
        self._process = _forkserver().Process(target=_serve, args=(seat, theirs), name=f"lockstep-rank{seat.rank}")
        with _one_thread():
            self._process.start()
        theirs.close()

    @property
    def waitables(self) -> tuple[Connection, int]:
        """Objects for `multiprocessing.connection.wait`: they are ready on an answer, or at the end of the process."""
        return self._connection, self._process.sentinel

    def send(self, request: Request) -> None:
        """Send a request. If the process is dead, `receive` will report it."""
        with suppress(OSError):
            self._connection.send(request)

    def receive(self) -> Answer:
        """Return the answer that has arrived, or a report of how the process died."""
        with suppress(EOFError, OSError):
            if self._connection.poll():
                answer: Answer = self._connection.recv()
                return answer
        return self.death()

    def death(self) -> RankReport:
        """Return a report of how the process died."""
        self._process.join(_END_SECONDS)
        return RankReport(self.rank, "died", describe_exit(self._process.exitcode), self.stack())

    def is_alive(self) -> bool:
        """Return whether the process is still running."""
        return self._process.is_alive()

    def output(self) -> str:
        """Return the last 64 KiB of what the body wrote to stdout and stderr."""
        with suppress(FileNotFoundError), self._seat.output.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _OUTPUT_BYTES_SHOWN))
            return file.read().decode(errors="replace")
        return ""

    def ask_for_stack(self) -> None:
        """Make the process write its stack, whatever it is doing."""
        with suppress(ProcessLookupError):
            os.kill(self._pid, STACK_SIGNAL)

    def await_stack(self) -> str:
        """Return the requested stack; waits at most 2 s for it."""
        deadline = time.monotonic() + _STACK_SECONDS
        seen = ""
        while time.monotonic() < deadline:
            time.sleep(0.02)
            text = self._seat.stacks.read_text() if self._seat.stacks.exists() else ""
            if text and text == seen:
                return self.stack()
            seen = text
        return self.stack() or "(the process did not answer when asked for its stack)"

    def stack(self) -> str:
        """Return what faulthandler has written, without the frames of this package."""
        with suppress(FileNotFoundError):
            threads = self._seat.stacks.read_text().split("\n\n")
            kept = [_body_frames(thread) for thread in threads if "in _die_with_parent" not in thread]
            return "\n\n".join(thread for thread in kept if thread)
        return ""

    def hang_up(self) -> None:
        """Close the connection, which tells the process to end."""
        self._connection.close()

    def end(self, patience: float) -> None:
        """Wait up to `patience` seconds for the process to end, then kill it and all processes that it has started."""
        self._process.join(patience)
        self._connection.close()
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._pid, signal.SIGKILL)
        self._process.kill()
        self._process.join(_END_SECONDS)
        self._process.close()

    @property
    def _pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid


def _serve(seat: Seat, connection: Connection) -> None:
    _redirect_output(seat.output)
    # Imported here, so that the test process itself need not import torch.
    from lockstep.testing.worker import serve

    serve(seat, connection)


def _redirect_output(path: Path) -> None:
    output = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    for stream in (sys.stdout, sys.stderr):
        assert isinstance(stream, TextIOWrapper)
        stream.reconfigure(line_buffering=True, errors="backslashreplace")


@cache
def _forkserver() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    return context


@contextmanager
def _one_thread() -> Iterator[None]:
    """Start the forkserver, if it is not running, so that it imports torch with one thread per process."""
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        forkserver.ensure_running()
        yield
    finally:
        if before is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = before


def _body_frames(thread: str) -> str:
    """Cut one thread's part of a faulthandler dump (most recent call first) at the first frame of this package."""
    kept = []
    for line in thread.splitlines():
        if line.lstrip().startswith(f'File "{_HERE}'):
            break
        if not line.startswith("Extension modules:"):
            kept.append(line)
    return "\n".join(kept).strip("\n")
