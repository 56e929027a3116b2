"""The state that a test body may change: reset before the body, and compared after it. Runs in the ranks."""

from __future__ import annotations

import os
import random
import socket
import stat
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field

import torch

from lockstep.engines import SET_BY_TORCH

_OPEN_FILES = "/proc/self/fd"
_SEED = 1234
_PATIENCE_SECONDS = 1.0


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

    def leaks(self, *, ignore_sockets: bool) -> list[str]:
        """Return what differs from before, as texts: variables, new threads, new open files.

        Args:
            ignore_sockets: a body's own sockets can't be distinguished from those of process groups: it has made some,
                or they connect at their first call, as an accelerator's backend does. Shared memory counts with them.
        """
        return [
            *_changed_variables(self.environment, dict(os.environ)),
            *(f"left thread {thread.name!r} running" for thread in self._new_threads()),
            *(f"left {file} open" for file in self._new_files(ignore_sockets)),
        ]

    def _new_threads(self) -> list[threading.Thread]:
        # A thread that was told to end needs a moment; a "dummy" represents a thread that Python did not start.
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while True:
            new = [x for x in threading.enumerate() if x not in self.threads]
            new = [x for x in new if not isinstance(x, threading._DummyThread)]
            if not new or time.monotonic() > deadline:
                return new
            time.sleep(0.005)

    def _new_files(self, ignore_sockets: bool) -> list[str]:
        # A thread of the group opens the store's file for a moment, again and again.
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while True:
            new = [
                _socket_name(descriptor) if name.startswith("socket:") else name
                for descriptor, name in _open_files().items()
                if self.files.get(descriptor) != name and _is_of_body(descriptor, name, ignore_sockets)
            ]
            if not new or time.monotonic() > deadline:
                return new
            time.sleep(0.005)


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


def _changed_variables(before: dict[str, str], now: dict[str, str]) -> list[str]:
    return [
        _change(name, before.get(name), now.get(name))
        for name in sorted(before.keys() | now.keys())
        if before.get(name) != now.get(name) and not name.startswith(SET_BY_TORCH)
    ]


def _change(name: str, before: str | None, now: str | None) -> str:
    if now is None:
        return f"removed environment variable {name}"
    if before is None:
        return f"left environment variable {name} set"
    return f"left environment variable {name} changed to {now!r}"


def _open_files() -> dict[int, str]:
    found: dict[int, str] = {}
    for entry in os.listdir(_OPEN_FILES) if os.path.isdir(_OPEN_FILES) else ():
        with suppress(OSError):  # the descriptor of the listing itself
            found[int(entry)] = os.readlink(f"{_OPEN_FILES}/{entry}")
    return found


def _socket_name(descriptor: int) -> str:
    """Return what tells a socket from others: its address, where it has one that can be read."""
    with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as copy:
        if copy.family in (socket.AF_INET, socket.AF_INET6):
            host, port, *_ = copy.getsockname()
            return f"socket {host}:{port}"
        return f"socket {copy.getsockname()}".rstrip()
    return "socket"


def _is_of_body(descriptor: int, name: str, ignore_sockets: bool) -> bool:
    """Return whether a body may have opened a descriptor (file, folder, socket), not a library (pipe, device)."""
    if ignore_sockets and name.startswith("/dev/shm/"):
        return False
    try:
        mode = os.fstat(descriptor).st_mode
    except OSError:
        return False
    if stat.S_ISSOCK(mode):
        return not ignore_sockets
    return stat.S_ISREG(mode) or stat.S_ISDIR(mode)
