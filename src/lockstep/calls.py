"""The record of calls: what this rank has called in each group, in which order, and from which lines.

Each group has one `Calls`. A call costs about a microsecond: nothing is formatted before an error needs the text.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections import Counter, deque
from collections.abc import Hashable, Mapping, Sequence
from copy import copy
from functools import cache
from hashlib import blake2b
from time import monotonic
from types import CodeType
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.distributed import Work

from lockstep.errors import DistError, ranks_in_words

_KEPT = 2**14  # calls
_MOST_EXPORTED = 2**12  # calls, as other ranks are told of them
_MOST_FINGERPRINTS = 2**12
_LOCKSTEP = os.path.dirname(__file__) + os.sep
_DIST = os.path.join(_LOCKSTEP, "dist") + os.sep
_COMMAND = os.path.join(_LOCKSTEP, "cli") + os.sep
# Frames that are neither the caller's nor lockstep's: those of torch and of `with`, and Python's own, such as runpy.
_FOREIGN = (os.path.dirname(torch.__file__) + os.sep, contextlib.__file__, "<frozen ")

_Key: TypeAlias = tuple[Any, ...]


@cache
def owner_of(file: str) -> str:
    """Return whose a file is, by its path: "caller", "dist", "command", "lockstep" or ""."""
    compat: Any = sys.modules.get("mmengine.version")  # lockstep-mmengine's, if it says so
    is_ours = hasattr(compat, "lockstep") and file.startswith(os.path.dirname(compat.__file__) + os.sep)
    if is_ours or file.startswith(_LOCKSTEP):
        return "dist" if file.startswith(_DIST) else "command" if file.startswith(_COMMAND) else "lockstep"
    return "" if file.startswith(_FOREIGN) else "caller"


class Call(NamedTuple):
    """One call, as all ranks must make it, and the line that makes it, which may differ.

    Attributes:
        text: name and arguments.
        site: the file and line outside of lockstep.
        fingerprint: 64 bits of the name and the arguments.
    """

    text: str
    site: str
    fingerprint: int

    def __str__(self) -> str:
        return f"{self.text} at {self.site}"


class _CallKind:
    """Calls that are alike and come from one line.

    Attributes:
        what: name and arguments, as all ranks must make them; of a tensor, its dtype and shape.
        fingerprint: 64 bits of `what`, and of the function of lockstep that makes the call, if it is not the caller.
    """

    __slots__ = ("_code", "_instruction", "_user", "fingerprint", "what")

    def __init__(self, code: CodeType, instruction: int, what: _Key, user: str | None) -> None:
        self._code, self._instruction = code, instruction
        self.what, self._user, self.fingerprint = what, user, fingerprint((*what, user))

    def described(self) -> Call:
        """Return it as text."""
        name, *arguments = self.what
        text = f"{name}({', '.join(map(_described, arguments))})" + (f" in {self._user}" if self._user else "")
        return Call(text, _site(self._code, self._instruction), self.fingerprint)


class Calls:
    """The calls of one rank in one group; the last ones, and a digest of all.

    Attributes:
        number: number of calls so far.
        digest: 64 bits that depend on all of these calls and their order.
        waiting: the call that this rank waits for, by number; 0 if it does not wait.
        since: when it began to wait, by the monotonic clock.
        running: the last call that runs on a device, or is asynchronous: its number, when it began, and what tells
            whether it is complete; None if there is none.
        event: what marks the last call on a device that gave no `Work`; made at the first one.
        device_index: number of the device on which calls run; None if none did yet.
        inside: name of the block that this rank runs while the others wait for it; "" outside.
        began: when the last call began.
        failure: the error that says why this group can't be used further; None if it can.
        has_failed: whether a call has raised an error of which other ranks may not know.
    """

    def __init__(self) -> None:
        self.resets = -1
        self.failure: DistError | None = None
        self.has_failed = False
        self.waiting, self.since, self.began = 0, 0.0, 0.0
        self.inside = ""
        self.event: torch.Event | None = None
        self.device_index: int | None = None
        self.reset()

    def reset(self) -> None:
        """Begin anew, after a mismatch that all ranks know of."""
        self.resets += 1
        self.number = self.digest = 0
        self.running: tuple[int, float, Work | torch.Event] | None = None
        self._kinds: dict[_Key, _CallKind] = {}
        self._seen: set[int] = set()
        self._recent: deque[tuple[_CallKind, int]] = deque(maxlen=_KEPT)  # with the digest after it

    def raise_failure(self) -> None:
        """Raise the error that says why this group can't be used further, if there is one."""
        if self.failure is not None:
            self.has_failed = True
            raise copy(self.failure)

    def add(self, name: str, arguments: tuple[object, ...]) -> bool:
        """Record a call, and return whether it is the first of its kind in this group, as it is then on every rank.

        Args:
            name: name of the function.
            arguments: what must be the same on all ranks; of tensors, this is dtype and shape.
        """
        function = sys._getframe(2)  # after `check_call`
        frame = function.f_back or function  # called by no Python code, such as atexit
        own = None
        # Which function of lockstep makes a call is compared, too: objects that it exchanges for different reasons must
        # not be taken for each other.
        user = "" if owner_of(function.f_code.co_filename) == "dist" else None
        while (owner := owner_of(frame.f_code.co_filename)) != "caller":
            if user == "" and owner in ("lockstep", "command"):
                user = frame.f_code.co_qualname
            own = own or (frame if owner else None)
            # Outside of the command are only the program and typer; then it is the line of lockstep's.
            if owner == "command" or frame.f_back is None:
                frame = own or function
                break
            frame = frame.f_back
        # The hash of a code object takes long; a kind keeps the object, so that no other gets its id.
        what = (name, *[(x.dtype, x.shape) if isinstance(x, Tensor) else x for x in arguments])
        key: _Key = (id(frame.f_code), frame.f_lasti, user, what)
        kind = self._kinds.get(key)
        is_new = False
        if kind is None:
            if len(self._kinds) >= 4 * _KEPT:
                self._kinds.clear()
            kind = self._kinds[key] = _CallKind(frame.f_code, frame.f_lasti, what, user)
            is_new = kind.fingerprint not in self._seen and len(self._seen) < _MOST_FINGERPRINTS
            if is_new:
                self._seen.add(kind.fingerprint)
        # Python's hash of integers is the same in every process.
        self.digest = hash((self.digest, kind.fingerprint))
        self._recent.append((kind, self.digest))
        self.number += 1
        self.began = monotonic()
        return is_new

    def is_running(self) -> bool:
        """Return whether the last call on a device is incomplete, without waiting for it; any thread may ask."""
        running = self.running
        if running is None:
            return False
        last = running[2]
        # In a thread that has no device yet, a question would make a context on the first one.
        with contextlib.suppress(RuntimeError), torch.accelerator.device_index(self.device_index):
            # A call that has failed is told by whoever waits for it.
            if not (last.query() if isinstance(last, torch.Event) else last.is_completed()):
                return True
        if self.running is running:
            self.running = None
        return False

    def unfinished(self) -> tuple[int, float]:
        """Return number and beginning of the call that this rank waits for, or that runs on a device; 0 if none."""
        waiting, since, running = self.waiting, self.since, self.running
        if waiting:
            return waiting, since
        return (running[0], running[1]) if running is not None and self.is_running() else (0, 0.0)

    def digest_after(self, number: int) -> int | None:
        """Return the digest after the first `number` calls; None if it is not kept. Any thread may ask."""
        last, recent = self._kept()
        index = number - last + len(recent) - 1
        return recent[index][1] if 0 <= index < len(recent) else None

    def call(self, number: int) -> Call | None:
        """Return a call by its number, from 1; None if it was not made, or is not kept. Any thread may ask."""
        last, recent = self._kept()
        index = number - last + len(recent) - 1
        return recent[index][0].described() if 0 <= index < len(recent) else None

    def export(self) -> dict[str, Any]:
        """Return the record in JSON values: kinds of calls, and for each of the last calls the index of its kind."""
        number, kept = self._kept()
        recent = kept[-_MOST_EXPORTED:]
        kinds = {kind: index for index, kind in enumerate(dict.fromkeys(kind for kind, _ in recent))}
        waiting, since = self.unfinished()
        return {
            "number": number,
            "digest": recent[-1][1] if recent else None,
            "resets": self.resets,
            "kinds": [kind.described() for kind in kinds],
            "recent": [kinds[kind] for kind, _ in recent],
            "waiting": waiting,
            "seconds": monotonic() - (since if waiting else self.began),
            "has_failed": self.failure is not None,
        }

    def _kept(self) -> tuple[int, list[tuple[_CallKind, int]]]:
        """Return the number of calls, and the last ones, while the main thread may go on."""
        while True:
            number, recent = self.number, list(self._recent)
            if number == self.number and (not recent or len(recent) == min(number, _KEPT)):
                return number, recent


class Record:
    """The calls of a rank, as it has exported them.

    Attributes:
        number: number of calls that it has made.
        digest: digest of these calls.
        resets: how often its record has begun anew.
        seconds: how long ago it began to wait, or its last call began.
        has_failed: whether it can't use the group further.
    """

    def __init__(self, exported: Mapping[str, Any]) -> None:
        self.number: int = exported["number"]
        self.digest: int | None = exported["digest"]
        self.resets: int = exported["resets"]
        self.seconds: float = exported["seconds"]
        self.has_failed: bool = exported["has_failed"]
        kinds = [Call(*one) for one in exported["kinds"]]
        self._recent = [kinds[index] for index in exported["recent"]]
        self.first = self.number - len(self._recent) + 1

    def __len__(self) -> int:
        return len(self._recent)

    def call(self, number: int) -> Call | None:
        """Return a call by its number, from 1; None if it was not made, or is not kept."""
        index = number - self.first
        return self._recent[index] if 0 <= index < len(self._recent) else None


def first_difference(records: Sequence[Record]) -> int | None:
    """Return the number of the first call that is not the same in all records; None if those that are kept are."""
    first = max(record.first for record in records)
    for number in range(first, max(record.number for record in records) + 1):
        calls = [record.call(number) for record in records]
        if len({None if call is None else call.fingerprint for call in calls}) > 1:
            return number
    return None


def unlike_most(values: Mapping[int, Hashable]) -> list[int]:
    """Return the keys of the values that differ from most of them, or from the first one if there is no majority."""
    [(usual, _)] = Counter(values.values()).most_common(1)  # of several, the first
    return sorted(key for key, value in values.items() if value != usual)


def grouped(lines: Mapping[int, str]) -> str:
    """Return one line for each set of ranks with the same text."""
    ranks_of: dict[str, list[int]] = {}
    for rank, text in lines.items():
        ranks_of.setdefault(text, []).append(rank)
    return "\n".join(f"  {ranks_in_words(ranks)}: {text}" for text, ranks in ranks_of.items())


def fingerprint(what: _Key) -> int:
    """Return 64 bits that are the same in every process; of a tensor, `what` has its dtype and shape."""
    text = repr([(str(x[0]), tuple(x[1])) if isinstance(x, tuple) else x for x in what])
    return int.from_bytes(blake2b(text.encode(errors="replace"), digest_size=8).digest(), "little", signed=True)


def _site(code: CodeType, instruction: int) -> str:
    lines = (line for start, end, line in code.co_lines() if start <= instruction < end and line is not None)
    return f"{short_path(code.co_filename)}:{next(lines, code.co_firstlineno)}"


def short_path(path: object) -> str:
    """Return a path from the working directory if it lies there, else the whole path."""
    try:
        folder = os.getcwd() + os.sep
    except OSError:
        return str(path)
    return str(path).removeprefix(folder)


def _described(argument: object) -> str:
    if isinstance(argument, tuple):
        dtype, shape = argument
        return f"{str(dtype).removeprefix('torch.')}[{', '.join(map(str, shape))}]"
    return str(argument).removeprefix("torch.") if isinstance(argument, torch.dtype) else str(argument)
