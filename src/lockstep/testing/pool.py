"""Pools of rank processes that outlive the tests: a body takes a millisecond, not the seconds of starting torch."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import pickle
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from io import TextIOWrapper
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

from lockstep.errors import counted, require_count
from lockstep.output import write_output_to
from lockstep.testing.messages import (
    STACK_SIGNAL,
    Answer,
    CleanUp,
    FunctionReference,
    Passed,
    RankFailure,
    RankReport,
    Request,
    Seat,
    Task,
    describe_exit,
)

DEFAULT_TIMEOUT_SECONDS = 60.0
_START_SECONDS = 120.0
_CLEAN_UP_SECONDS = 30.0
# How long the others may take to fail or finish once one rank has failed.
_GRACE_SECONDS = 1.0
_MOST_POOLS_ALIVE = 4
# Besides the worker with torch: what DDP, FSDP and checkpoints import on first use (1.5 s in every rank), and what test
# modules import. Missing modules are skipped.
_PRELOADED = ("lockstep.testing.worker", "torch._inductor.config", "torch.distributed.checkpoint", "pytest")
# Modules of these packages are preloaded, too, if the test process has them by then: the bodies will need them. Engines
# are not, since they may use the accelerator as they are imported, which a forked process then can't use; nor are
# packages that look then at the number of their rank, as torchmetrics does.
_PRELOADED_IF_USED = ("lockstep.", "hypothesis.")
_NEVER_PRELOADED = ("lockstep.strategy.colossalai.", "lockstep.strategy.deepspeed.")
_END_SECONDS = 5.0
_STACK_SECONDS = 2.0
_OUTPUT_BYTES_SHOWN = 64 * 1024
_HERE = str(Path(__file__).parent)


def run_ranks(size: int, body: Callable[..., Any], /, *args: Any, **kwargs: Any) -> list[Any]:
    """Run ``body(*args, **kwargs)`` on `size` real ranks at once, and return each rank's result, in rank order.

    The ranks share a process group, and have this process's present environment, current directory and import path.

    Args:
        size: number of ranks.
        body: a function at the top level of a module.
        *args: positional arguments, pickled once and sent to every rank.
        **kwargs: keyword arguments, likewise.

    **Raises**: RankFailure if a rank died, raised, left something behind or did not finish within 60 s; TypeError if
    the body can't be found by name or an argument can't be pickled.

    **Example**::

        def total() -> float:
            data = torch.ones(1)
            all_reduce(data)
            return data.item()


        assert run_ranks(2, total) == [2.0, 2.0]
    """
    __tracebackhide__ = True
    return run_body(body, args, kwargs, size=size)


def run_body(
    body: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    *,
    size: int,
    timeout: float = DEFAULT_TIMEOUT_SECONDS,
    fresh: bool = False,
    warnings: str = "error",
) -> list[Any]:
    """Run a body on `size` ranks; see `ranks` for the options."""
    __tracebackhide__ = True
    require_count("size", size)
    reference = FunctionReference.of(body)
    task = Task(reference, _pickled(reference, args, kwargs), dict(os.environ), os.getcwd(), list(sys.path), warnings)
    title = f"{reference.qualname} on {counted(size, 'rank')}"
    try:
        values = (_run_fresh if fresh else _run_pooled)(size, task, timeout, title)
    except RankFailure as failure:
        # The relevant tracebacks are in the message; those of this package would only hide it.
        raise failure.with_traceback(None) from None
    global _ranks_passed
    _ranks_passed += size
    return values


def ranks_passed() -> int:
    """Return the total number of ranks on which bodies have passed in this process."""
    return _ranks_passed


def close_pools() -> None:
    """End all rank processes and remove their folders. The next `run_ranks` starts new ones."""
    while _alive:
        _alive.popitem()[1].close()


class Pool:
    """`size` rank processes, in one process group unless `join` is false."""

    def __init__(self, size: int, *, join: bool = True) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="lockstep-ranks-"))
        self._last_title = "starting"
        self._ranks: list[RankProcess] = []
        try:
            for rank in range(size):
                self._ranks.append(RankProcess(Seat(rank, size, self._folder, join)))
            self._collect("starting the ranks", _START_SECONDS)
        except BaseException:
            self.close(patience=0.0)
            raise

    def run(self, task: Task, timeout: float, title: str) -> list[Any]:
        """Run a body on all ranks and return their values.

        Raises:
            RankFailure: a rank did not pass; the pool can no longer be used.
        """
        dead = [rank for rank in self._ranks if not rank.is_alive()]
        if dead:
            raise self._failure(f"before {title}, but after {self._last_title}", [rank.death() for rank in dead])
        self._last_title = title
        passed = self._exchange(task, timeout, title)
        clean_up = CleanUp(regroup=any(answer.made_groups for answer in passed))
        self._exchange(clean_up, _CLEAN_UP_SECONDS, title)
        for rank in self._ranks:  # so that `pytest -s` and `-rP` show it
            for line in rank.output().splitlines():
                print(f"[rank {rank.rank}] {line}")
        return [pickle.loads(answer.value) for answer in passed]

    def close(self, patience: float = 2.0) -> None:
        """Let the ranks end; kill each one that has not ended after `patience` seconds."""
        for rank in self._ranks:
            rank.hang_up()
        for rank in self._ranks:
            rank.end(patience)
        self._ranks.clear()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _exchange(self, request: Request, timeout: float, title: str) -> list[Passed]:
        for rank in self._ranks:
            rank.send(request)
        return self._collect(title, timeout)

    def _collect(self, title: str, timeout: float) -> list[Passed]:
        """Wait for one answer from every rank."""
        answers: dict[int, Answer] = {}
        deadline = time.monotonic() + timeout
        while pending := [rank for rank in self._ranks if rank.rank not in answers]:
            ready = wait(
                [waitable for rank in pending for waitable in rank.waitables],
                max(0.0, deadline - time.monotonic()),
            )
            if not ready:
                break
            for rank in pending:
                if any(waitable in ready for waitable in rank.waitables):
                    answers[rank.rank] = rank.receive()
            if any(isinstance(answer, RankReport) for answer in answers.values()):
                deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
        failed = [answer for answer in answers.values() if isinstance(answer, RankReport)]
        if failed or pending:
            raise self._failure(title, failed + _where_they_stand(pending, failed, timeout))
        return [a for rank in self._ranks if isinstance(a := answers[rank.rank], Passed)]

    def _failure(self, title: str, reports: list[RankReport]) -> RankFailure:
        return RankFailure.of(title, [replace(one, output=self._ranks[one.rank].output()) for one in reports])


_alive: dict[int, Pool] = {}  # the pools of this process, by size, least recently used first
_ranks_passed = 0
atexit.register(close_pools)


def _run_pooled(size: int, task: Task, timeout: float, title: str) -> list[Any]:
    pool = _alive.pop(size, None)
    if pool is None:
        while len(_alive) >= _MOST_POOLS_ALIVE:
            _alive.pop(next(iter(_alive))).close()
        pool = Pool(size)
    try:
        values = pool.run(task, timeout, title)
    except BaseException:
        # The state of its ranks is unknown.
        pool.close(patience=0.0)
        raise
    _alive[size] = pool
    return values


def _run_fresh(size: int, task: Task, timeout: float, title: str) -> list[Any]:
    task.environment.setdefault("MASTER_ADDR", "127.0.0.1")
    task.environment.setdefault("MASTER_PORT", str(free_port()))
    pool = Pool(size, join=False)
    try:
        return pool.run(task, timeout, title)
    finally:
        pool.close(patience=0.0)


def _where_they_stand(pending: list[RankProcess], failed: list[RankReport], timeout: float) -> list[RankReport]:
    reason = f"not finished after {timeout:g} s"
    if failed:
        reason = f"still running {_GRACE_SECONDS:g} s after rank {min(one.rank for one in failed)} had failed"
    for rank in pending:
        rank.ask_for_stack()
    return [RankReport(rank.rank, "hung", reason, rank.await_stack()) for rank in pending]


def _pickled(body: FunctionReference, args: Sequence[Any], kwargs: dict[str, Any]) -> bytes:
    for name, value in [(f"number {i}", value) for i, value in enumerate(args)] + list(kwargs.items()):
        if type(value).__name__ == "MonkeyPatch":
            raise TypeError(
                f"argument {name} of {body.qualname} must not be pytest's monkeypatch: the ranks get a copy of it, "
                "which undoes nothing. Use `with pytest.MonkeyPatch.context() as monkeypatch:` in the test"
            )
        try:
            pickle.dumps(value)
        except Exception as error:
            raise TypeError(
                f"argument {name} of {body.qualname} must be picklable, since it is sent to other processes, but is "
                f"not: {error}. Send plain values; name fixtures that only prepare the parent in "
                "@pytest.mark.usefixtures"
            ) from error
    return pickle.dumps((tuple(args), kwargs), protocol=5)


def free_port() -> int:
    """Return a port of this machine where nobody listens.

    It is below those that the system gives to connections, one of which might take it before it is used.
    """
    while True:
        port = 10000 + secrets.randbelow(10000)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


class RankProcess:
    """A process that runs bodies as one rank of a pool."""

    def __init__(self, seat: Seat) -> None:
        self.rank = seat.rank
        self._seat = seat
        self._connection, theirs = multiprocessing.Pipe()
        self._process = start_importing().Process(target=_serve, args=(seat, theirs), name=f"lockstep-rank{seat.rank}")
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
    write_output_to(seat.output)
    for stream in (sys.stdout, sys.stderr):
        assert isinstance(stream, TextIOWrapper)
        stream.reconfigure(line_buffering=True, errors="backslashreplace")
    # Imported here, so that the test process itself need not import torch.
    from lockstep.testing.worker import serve

    serve(seat, connection)


@cache
def start_importing() -> ForkServerContext:
    """Let a process import what ranks will need, while this one goes on: they are forked from it."""
    context = multiprocessing.get_context("forkserver")
    # In the order in which they were first imported here.
    used = [name for name in list(sys.modules) if f"{name}.".startswith(_PRELOADED_IF_USED)]
    context.set_forkserver_preload(
        [*_PRELOADED, *(name for name in used if not f"{name}.".startswith(_NEVER_PRELOADED))]
    )
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"  # torch computes with one thread in each rank
    try:
        forkserver.ensure_running()
        return context
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
