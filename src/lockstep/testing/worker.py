"""One rank: runs the bodies that the test process sends, until it closes the connection. The forkserver preloads it.

The state that a body may change is reset before it, and compared after it.
"""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import pickle
import random
import shutil
import signal
import sys
import threading
import time
import traceback
import unittest
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from textwrap import shorten
from types import TracebackType
from typing import Any

import torch
from torch.distributed import FileStore, distributed_c10d

from lockstep.dist import destroy_dist, get_default_group, init_dist
from lockstep.engines import SET_BY_TORCH, set_environment
from lockstep.errors import PEER_IS_GONE, PeerError
from lockstep.testing.messages import (
    STACK_SIGNAL,
    Answer,
    CleanUp,
    FunctionReference,
    Passed,
    RankReport,
    Request,
    Seat,
    Task,
)

# Longer than the default time limit of a test, so that a hang is reported with live stacks, not as a rank's timeout.
_GROUP_TIMEOUT_SECONDS = 120.0
_SUMMARY_WIDTH = 160
_HERE = str(Path(__file__).parent)
_OPEN_FILES = "/proc/self/fd"
# Threads that live on, of which a body need not know: torch's compiler starts the first; the other ends with a pass
# through a loader, which an error may keep.
_LIVE_ON = {"tqdm_monitor", "lockstep-data"}
_SEED = 1234
_PATIENCE_SECONDS = 1.0


def serve(seat: Seat, connection: Connection) -> None:
    """Become the rank of `seat`, and answer requests until the test process closes the connection."""
    _detach(seat)
    rank = _Rank(seat)
    connection.send(rank.answer(rank.start))
    with suppress(EOFError, OSError):
        while True:
            request = connection.recv()
            connection.send(rank.answer(rank.run if isinstance(request, Task) else rank.clean_up, request))
    rank.leave()


class _Rank:
    """The state of a rank between bodies, and its answers to requests."""

    def __init__(self, seat: Seat) -> None:
        self._seat = seat
        self._variables = {
            "RANK": str(seat.rank),
            "LOCAL_RANK": str(seat.rank),
            "WORLD_SIZE": str(seat.size),
            "LOCAL_WORLD_SIZE": str(seat.size),
            "OMP_NUM_THREADS": "1",
        }
        self._times_joined = 0
        self._default_group = get_default_group()
        self._before = Surroundings()
        self._warnings = "error"
        self._strays = catch_strays()

    def start(self) -> Answer:
        self._variables |= _own_host(self._seat)
        os.environ.update(self._variables)
        if self._seat.join:
            self._join()
        gc.freeze()
        return Passed()

    def answer(self, work: Callable[..., Answer], *request: Request) -> Answer:
        try:
            return work(*request)
        except BaseException as error:
            return _describe(error, self._seat.rank)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()

    def run(self, task: Task) -> Answer:
        """Run a body as if the test process had just started this rank."""
        os.truncate(self._seat.output, 0)
        os.chdir(task.folder)
        sys.path[:] = task.import_path
        set_environment({**task.environment, **self._variables})
        body = self._load(task.reference)
        args, kwargs = pickle.loads(task.arguments)
        reset_settings(self._seat.rank)
        self._warnings = task.warnings
        self._strays.clear()
        self._before = Surroundings()
        with _warnings_as(self._warnings):
            value = pickle.dumps(body(*args, **kwargs), protocol=5)
        # torch 2.13 has no public list of the groups of a process.
        return Passed(value, made_groups=len(distributed_c10d._world.pg_map) > 1)

    def clean_up(self, request: CleanUp) -> Answer:
        """Release what the body used, and compare the surroundings with those before it.

        All ranks have passed by now, so no connection is closed that a peer still needs.
        """
        with _warnings_as(self._warnings):
            gc.collect()
        leaks = list(self._strays)
        if self._seat.join:
            leaks += self._before.leaks()
            if get_default_group() is not self._default_group:
                leaks.append("destroyed the default process group, which belongs to the pool")
        if leaks:
            return RankReport(self._seat.rank, "leaked", leaks[0], "\n".join(leaks[1:]))
        if request.regroup or not self._seat.join:
            self.leave()
        if request.regroup and self._seat.join:
            self._join()
        return Passed()

    def leave(self) -> None:
        """Leave all groups."""
        self._default_group = None  # `destroy_dist` waits for the threads of a group that is still held
        destroy_dist()

    def _load(self, reference: FunctionReference) -> Callable[..., Any]:
        modules = len(sys.modules)
        body = reference.load()
        if len(sys.modules) != modules:
            # Objects of modules live on. Without them, the garbage collection after each body takes microseconds, not
            # 50 ms.
            gc.freeze()
        return body

    def _join(self) -> None:
        # A new file each time, because a FileStore keeps the keys of the previous group.
        store = FileStore(str(self._seat.folder / f"store{self._times_joined}"), self._seat.size)
        self._times_joined += 1
        before = dict(os.environ)
        # NCCL needs a device per rank; if there are fewer, the ranks share them over gloo.
        has_own = torch.accelerator.device_count() >= self._seat.size or "NCCL_HOSTID" in self._variables
        backend = None if has_own else "gloo"
        init_dist("pytorch", backend, timeout=_GROUP_TIMEOUT_SECONDS, store=store)
        self._variables |= {name: os.environ[name] for name in os.environ.keys() - before.keys()}
        self._default_group = get_default_group()


def _own_host(seat: Seat) -> dict[str, str]:
    """Return the variable by which NCCL takes ranks that share a GPU, if it was set for the tests.

    NCCL (2.28) refuses two ranks on one GPU if they are of one host. Ranks of different hosts meet over sockets.
    """
    name = os.environ.get("NCCL_HOSTID")
    shares = name and torch.cuda.is_available() and torch.cuda.device_count() < seat.size
    return {"NCCL_HOSTID": f"{name}-{seat.rank}"} if shares else {}


def _detach(seat: Seat) -> None:
    """Start a new session: Ctrl-C reaches only the test process, but when that ends, this process ends, too."""
    os.setsid()
    stacks = seat.stacks.open("w")
    faulthandler.enable(stacks)
    # Those of other threads would change while they are read: one that runs then ends the process (CPython 3.11.7).
    faulthandler.register(STACK_SIGNAL, stacks, all_threads=False)
    threading.Thread(target=_die_with_parent, args=(seat.folder,), daemon=True).start()


def _die_with_parent(folder: Path) -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    gone = folder.with_name(f"{folder.name}-gone")
    with suppress(OSError):  # another rank was first
        folder.rename(gone)  # else a thread of the group makes the store's file anew, while the folder is removed
    shutil.rmtree(gone, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)


@contextmanager
def _warnings_as(action: str) -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter(action)  # type: ignore[arg-type]
        # The process group of every rank has threads, so this warning says nothing about the test.
        warnings.filterwarnings("ignore", "This process .* is multi-threaded, use of fork")
        warnings.filterwarnings("ignore", "Guards may run slower on Python 3.13.0")  # of that version's, in torch 2.13
        yield


def _describe(error: BaseException, rank: int) -> RankReport:
    shown = error.with_traceback(_without_own_frames(error.__traceback__))
    text = "".join(traceback.format_exception(shown))
    first_line = traceback.format_exception_only(shown)[0].strip().partition("\n")[0]
    summary = shorten(first_line, _SUMMARY_WIDTH, placeholder=" ...")
    if _is_skip(error):
        remedy = "Skips are decided in the parent: use @pytest.mark.skipif or a fixture"
        summary = f"a rank may not skip ({summary}). {remedy}"
    consequence = isinstance(error, PeerError) or any(sign in text for sign in PEER_IS_GONE)
    return RankReport(rank, "raised", summary, text, consequence=consequence)


def _is_skip(error: BaseException) -> bool:
    pytest = sys.modules.get("pytest")
    kinds = () if pytest is None else (pytest.skip.Exception, pytest.xfail.Exception)
    return isinstance(error, (unittest.SkipTest, *kinds))


def _without_own_frames(trace: TracebackType | None) -> TracebackType | None:
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(_HERE):
        trace = trace.tb_next
    return trace


def reset_settings(rank: int) -> None:
    """Reset the state before a body: seeds (a different one on each rank, as in real jobs), default dtype, flags."""
    seed = _SEED + rank
    random.seed(seed)
    torch.manual_seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)
    torch.set_default_dtype(torch.float32)
    if torch.get_default_device().type != "cpu":
        torch.set_default_device(None)
    torch.set_grad_enabled(True)
    if torch.are_deterministic_algorithms_enabled():  # the call below imports half of the compiler
        torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.deterministic = False
    torch.backends.cudnn.benchmark = False
    if torch.get_num_threads() != 1:
        torch.set_num_threads(1)


@dataclass(frozen=True, slots=True)
class Surroundings:
    """The environment, threads and open files before a body, to find out what it left behind."""

    environment: dict[str, str] = field(default_factory=lambda: dict(os.environ))
    threads: frozenset[threading.Thread] = field(default_factory=lambda: frozenset(threading.enumerate()))
    files: dict[int, str] = field(default_factory=lambda: _open_files())

    def leaks(self) -> list[str]:
        """Return what differs from before, as texts: variables, new threads, new open files."""
        return [
            *_changed_variables(self.environment, dict(os.environ)),
            *(f"left thread {thread.name!r} running" for thread in _lasting(self._new_threads)),
            *(f"left {file} open" for file in _lasting(self._new_files)),
        ]

    def _new_threads(self) -> list[threading.Thread]:
        new = [x for x in threading.enumerate() if x not in self.threads and x.name not in _LIVE_ON]
        return [x for x in new if not isinstance(x, threading._DummyThread)]  # which Python did not start

    def _new_files(self) -> list[str]:
        return [name for descriptor, name in _open_files().items() if self.files.get(descriptor) != name]


def _lasting(look: Callable[[], list[Any]]) -> list[Any]:
    """Return what is still there after a moment: a thread that was told to end, or the store's file, is soon gone."""
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while (new := look()) and time.monotonic() < deadline:
        time.sleep(0.005)
    return new


def catch_strays() -> list[str]:
    """Return a list that from now on receives uncaught exceptions of finalisers and threads."""
    strays: list[str] = []

    def in_finaliser(unraisable: sys.UnraisableHookArgs) -> None:
        if issubclass(unraisable.exc_type, ResourceWarning):  # it names the object
            strays.append(f"ResourceWarning: {unraisable.exc_value}")
        else:
            strays.append(f"{unraisable.exc_value!r} was raised while finalising {unraisable.object!r}")

    def in_thread(args: threading.ExceptHookArgs) -> None:
        name = args.thread.name if args.thread is not None else "unknown"
        strays.append(f"{args.exc_value!r} ended thread {name!r}")

    sys.unraisablehook, threading.excepthook = in_finaliser, in_thread
    return strays


def _changed_variables(before: dict[str, str], now: dict[str, str]) -> Iterator[str]:
    for name in sorted({name for name, _ in before.items() ^ now.items()}):
        if name.startswith(SET_BY_TORCH):
            continue
        if name not in now:
            yield f"removed environment variable {name}"
        else:
            yield f"left environment variable {name} {f'changed to {now[name]!r}' if name in before else 'set'}"


def _open_files() -> dict[int, str]:
    """Return the open files and folders by descriptor; pipes, sockets, devices and shared memory are of libraries."""
    found: dict[int, str] = {}
    for entry in os.listdir(_OPEN_FILES) if os.path.isdir(_OPEN_FILES) else ():
        with suppress(OSError):  # the descriptor of the listing itself
            name = os.readlink(f"{_OPEN_FILES}/{entry}")
            if name.startswith("/") and not name.startswith("/dev/"):
                found[int(entry)] = name
    return found
