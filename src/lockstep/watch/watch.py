"""The watch: a thread of each rank that can say what this rank does, also while its main thread waits or hangs.

Ranks ask each other through the store at which they met, not through the group, which may be stuck. So an error can
name the ranks that did not arrive, with their last calls and their stacks, and a mismatch can show what each rank
called. The thread sleeps; about four times a second it looks whether something is asked, and how long the main thread
has waited.

Keys of a rank r: `who/r` (host and process), `asks/r` (number of questions so far), `asked/r/n` (the n-th), `state/r`
(the answer), `done/r` (it has ended). Keys of a group: `same/g` (digest of its first rank's calls, every second),
`failure/g` (why it can't be used further), `calls/g/n/r` (calls of rank r at the n-th mismatch).
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as torch_dist
from torch.distributed import GroupMember, ProcessGroup, Store

from lockstep.calls import Calls, Failure, Record, short_path
from lockstep.errors import PEER_IS_GONE, DistError, message_of, ranks_in_words
from lockstep.groups import Comm, recorded_groups
from lockstep.watch.words import Absent, described, lines_of, name_of, records_of

_TICK_SECONDS = 0.25
_RANKS_PER_TICK = 200  # more ranks ask less often, so that the store has as much to do
_SECONDS_TO_ANSWER = 1.5
_SECONDS_TO_LOOK = 1.0  # after which a wait is looked at for the first time, then at doubling intervals
_SECONDS_TO_COMPARE = 1.0
_SECONDS_OF_STORE = 10.0  # for one answer; torch would look for five minutes for the file of a FileStore that is gone
POLL_SECONDS = 0.005
_FRAMES = 6
_LOCKSTEP = os.path.dirname(os.path.dirname(__file__))
_LIBRARIES = (os.path.dirname(torch.__file__) + os.sep, _LOCKSTEP + os.sep)
_ROOMS = tuple(os.path.join(_LOCKSTEP, room, "") for room in ("dist", "transport", "watch"))
# Where torch's collectives and backward passes, and lockstep's collectives, wait for other ranks.
_WAITING = (
    os.path.join("torch", "distributed") + os.sep,
    os.path.join("torch", "autograd") + os.sep,
    os.path.join("torch", "nn", "parallel") + os.sep,
    *_ROOMS,
    *map(short_path, _ROOMS),
)
_HEARTBEAT = "LOCKSTEP_HEARTBEAT"

_logger = logging.getLogger("lockstep.dist")
_watch: Watch | None = None


def side_store() -> Store:
    """Return a new connection to the store at which the ranks met.

    A thread may wait at it without stopping the others. Keys are those of the default group.

    Raises:
        DistError: the store can't be shared, or there is none.
    """
    try:
        met: Any = torch_dist.distributed_c10d._get_default_store()
        return cast("Store", met.clone())  # torch's stubs lack it
    except Exception as error:
        raise DistError(f"the ranks have no store that can be shared: {message_of(error)}") from error


def start_watch() -> None:
    """Start the thread for the default group, unless it runs."""
    global _watch
    default = GroupMember.WORLD
    if default is None or default.size() < 2 or torch_dist.get_backend(default) == "fake":
        return
    if _watch is not None and _watch.default == id(default):
        return
    if _watch is not None:
        _watch.stop()
    with suppress(DistError):
        _watch = Watch(default)


def current_watch() -> Watch | None:
    """Return the watch of the default group, if it runs."""
    return _watch


def take_watch() -> Watch | None:
    """Return the watch of the default group, if it runs; from now on there is none."""
    global _watch
    watch, _watch = _watch, None
    return watch


class Watch:
    """What this rank knows about the others, and tells them.

    Attributes:
        default: `id` of the default group.
        error: with which this rank ends.
        is_cut_off: whether the store has not answered.
        looks_for_others: whether a collective has failed here, because of another rank: this one is not late.
    """

    def __init__(self, default: ProcessGroup) -> None:
        self.default = id(default)
        self.rank, self.size = default.rank(), default.size()
        self.store = side_store()
        self.store.set_timeout(timedelta(seconds=_SECONDS_OF_STORE))
        self._host, self._pid = socket.gethostname(), os.getpid()
        self._answered = 0
        self._lock = threading.RLock()
        self._beat = _heartbeat_seconds()
        # For each group: when a wait began, and after how many seconds of it to look and to warn.
        self._waits: dict[str, tuple[float, float, float]] = {}
        self._compared = time.monotonic()
        self._doubts: set[tuple[str, int]] = set()
        self._who: dict[int, dict[str, Any]] = {}
        self.error = ""
        self.is_cut_off = False
        self.looks_for_others = False
        self.store.set(f"who/{self.rank}", json.dumps({"host": self._host, "pid": self._pid}))
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lockstep-watch", daemon=True)
        self._thread.start()
        atexit.register(self.stop)

    def stop(self) -> None:
        """End the thread, after what it does at present."""
        atexit.unregister(self.stop)
        self._stop.set()
        if self._thread is not threading.current_thread():
            self._thread.join(2.0)

    def _run(self) -> None:
        tick = _TICK_SECONDS * max(1.0, self.size / _RANKS_PER_TICK)
        with suppress(Exception):  # the store is gone, and so is the job
            while not self._stop.wait(tick):
                self._answer()
                for comm, calls in recorded_groups():
                    self._look(comm, calls)
                if time.monotonic() - self._compared > _SECONDS_TO_COMPARE:
                    self._compared = time.monotonic()
                    self._compare()

    # Questions and answers.

    def state(self, *, ended: bool = False) -> dict[str, Any]:
        """Return what this rank does."""
        return {
            "asks": self._answered,
            "groups": {name_of(comm): calls.export() for comm, calls in recorded_groups()},
            "stack": [] if ended else _stack(),
            "ended": ended,
            "error": self.error,
            "looks": self.looks_for_others,
        }

    def _answer(self) -> None:
        with self._lock:
            before = self._answered
            while self.store.check([f"asked/{self.rank}/{self._answered}"]):
                self._answered += 1
            if self._answered == before:
                return
            for comm, calls in recorded_groups():
                if calls.failure is None:
                    self.hear_of_failure(comm, calls)
            self.store.set(f"state/{self.rank}", json.dumps(self.state()))

    def hear_of_failure(self, comm: Comm, calls: Calls) -> None:
        """Learn why a group can't be used further, if another rank has said so."""
        key = f"failure/{name_of(comm)}"
        if self.store.check([key]):
            calls.failure = Failure(*json.loads(self.store.get(key)))
            if calls.waiting and threading.current_thread() is self._thread:
                interrupt(comm)

    def ask(self, ranks: Iterable[int]) -> dict[int, dict[str, Any] | None]:
        """Return what some ranks do, by rank in the default group; None for one that does not answer."""
        waiting = {}
        answers: dict[int, dict[str, Any] | None] = {}
        for rank in ranks:
            answers[rank] = self.state() if rank == self.rank else self.last_word(rank)
            if answers[rank] is None and self.process(rank) not in ("gone", "stopped"):
                number = self.store.add(f"asks/{rank}", 1)
                self.store.set(f"asked/{rank}/{number - 1}", "")
                waiting[rank] = number
        deadline = time.monotonic() + _SECONDS_TO_ANSWER
        while waiting and time.monotonic() < deadline:
            self._answer()  # somebody may be asking this rank
            for rank, number in list(waiting.items()):
                if self.store.check([f"state/{rank}"]):
                    state = json.loads(self.store.get(f"state/{rank}"))
                    if state["ended"] or state["asks"] >= number:
                        answers[rank] = state
                        del waiting[rank]
                if rank in waiting and self.process(rank) in ("gone", "stopped"):
                    del waiting[rank]
            if waiting:
                time.sleep(POLL_SECONDS)
        return answers

    def last_word(self, rank: int) -> dict[str, Any] | None:
        """Return what a rank has said at its end; None if it has not ended."""
        if not self.store.check([f"state/{rank}"]):
            return None
        state: dict[str, Any] = json.loads(self.store.get(f"state/{rank}"))
        return state if state["ended"] else None

    # What a mismatch is.

    def explain(self, comm: Comm, calls: Calls, *, wait: bool) -> Failure:
        """Return which call is the first that differs between the ranks of a group.

        Args:
            comm: the group.
            calls: this rank's.
            wait: all ranks are about to call this.
        """
        name = name_of(comm)
        own = calls.export()
        exported: dict[int, Any] = {comm.rank: own}
        if wait:
            prefix = f"calls/{name}/{calls.resets}"
            self.store.set(f"{prefix}/{comm.rank}", json.dumps(own))
            keys = {rank: f"{prefix}/{rank}" for rank in range(comm.size) if rank != comm.rank}
            deadline = time.monotonic() + _SECONDS_TO_ANSWER
            while not self.store.check(list(keys.values())) and time.monotonic() < deadline:
                time.sleep(POLL_SECONDS / 5)
            for rank, key in keys.items():
                if self.store.check([key]):
                    exported[rank] = json.loads(self.store.get(key))
        missing = {comm.ranks[rank]: rank for rank in range(comm.size) if rank not in exported}
        states = self.ask(missing)
        ended = {}
        for rank, state in states.items():
            if state is not None and name in state["groups"]:
                exported[missing[rank]] = state["groups"][name]
                if state["ended"]:
                    ended[missing[rank]] = state["error"]
        return described(comm, {rank: Record(exported[rank]) for rank in sorted(exported)}, ended)

    def declare(self, comm: Comm, failure: Failure) -> None:
        """Tell the other ranks of a group why it can't be used further."""
        self.store.set(f"failure/{name_of(comm)}", json.dumps(failure))
        for rank in comm.ranks:
            if rank != self.rank:
                number = self.store.add(f"asks/{rank}", 1)
                self.store.set(f"asked/{rank}/{number - 1}", "")

    def _fail(self, comm: Comm, calls: Calls) -> None:
        """Find out how the calls differ, and let all ranks of the group fail."""
        failure = self.explain(comm, calls, wait=False)
        if calls.failure is None:
            calls.failure = failure
            self.declare(comm, failure)
            if calls.waiting and threading.current_thread() is self._thread:
                interrupt(comm)

    def _compare(self) -> None:
        """Compare the calls so far with those of the first rank of each group."""
        for comm, calls in recorded_groups():
            if calls.failure is not None:
                continue
            key = f"same/{name_of(comm)}"
            if comm.rank == 0:
                number, resets = calls.number, calls.resets
                if number:
                    self.store.set(key, json.dumps([number, calls.digest_after(number), resets]))
            elif self.store.check([key]):
                number, digest, resets = json.loads(self.store.get(key))
                own = calls.digest_after(number)
                doubt = (key, resets)
                if own is None or digest is None or resets != calls.resets or own == digest:
                    self._doubts.discard(doubt)
                elif doubt in self._doubts:
                    self._fail(comm, calls)
                else:
                    self._doubts.add(doubt)  # the main threads may be about to raise an error themselves

    # Waiting.

    def _look(self, comm: Comm, calls: Calls) -> None:
        """If the main thread has waited for long, find out whether the others make another call, and say for whom."""
        name, number, since = name_of(comm), calls.waiting, calls.since
        if not number:
            return
        seconds = time.monotonic() - since
        begun, due, beat = self._waits.get(name, (0.0, 0.0, 0.0))
        if begun != since:
            due, beat = _SECONDS_TO_LOOK, self._beat
        looks, warns = seconds >= due, seconds >= beat
        self._waits[name] = (since, 2 * due if looks else due, 2 * beat if warns else beat)
        if looks and self._is_first(f"look/{name}/{calls.resets}/{number}/{2 * due}"):
            self._find_mismatch(comm, calls, number)
        if warns and calls.waiting == number and self._is_first(f"beat/{name}/{calls.resets}/{number}/{beat}"):
            absent = self.find_absent(comm, calls, number)
            if calls.waiting == number and absent:
                who = ranks_in_words([one.rank for one in absent])
                _logger.warning(
                    "waiting %.0f s for %s of %s in %s\n%s",
                    seconds, who, comm.name, calls.call(number), lines_of(absent),
                )  # fmt: skip

    def _is_first(self, key: str) -> bool:
        return bool(self.store.add(key, 1) == 1)

    def _find_mismatch(self, comm: Comm, calls: Calls, number: int) -> None:
        states = self.ask(comm.ranks)
        records = records_of(comm, states)
        if calls.failure is not None or calls.waiting != number or comm.rank not in records:
            return
        own = records[comm.rank].call(number)
        for rank, record in records.items():
            other = record.call(number)
            state = states[comm.ranks[rank]]
            has_left = state is not None and state["ended"] and not state["error"] and record.number < number
            if record.failure is None and (
                has_left or (other is not None and own is not None and other.fingerprint != own.fingerprint)
            ):
                self._fail(comm, calls)
                return

    def find_absent(self, comm: Comm, calls: Calls, number: int | None = None) -> list[Absent]:
        """Return which ranks of a group have not made a call that this rank has made, and what they do."""
        has_failed, number = number is None, calls.number if number is None else number
        states = self.ask(comm.ranks)
        records = records_of(comm, states)
        if has_failed and number:
            self._find_cause(comm, calls, records)
        others = [rank for rank in range(comm.size) if rank != comm.rank]
        made = {rank: records[rank].number if rank in records else 0 for rank in others}
        absent = [rank for rank in others if states[comm.ranks[rank]] is None or made[rank] < number]
        if not absent:  # those that have made the call, and then ended, may have done so because of others
            absent = [rank for rank in others if (states[comm.ranks[rank]] or {}).get("ended")]
        if not absent:  # torch's own collectives are not recorded: whoever is not in one of them is late
            absent = [rank for rank in others if not _is_waiting(states[comm.ranks[rank]])]
        found = []
        for rank in absent:
            world_rank = comm.ranks[rank]
            state = states[world_rank]
            process = self.process(world_rank) if state is None else ""
            found.append(
                Absent(
                    rank,
                    self._words(world_rank, state, process, records.get(rank)),
                    process == "gone" or (state is not None and state["ended"]),
                    "" if state is None else str(state["error"]),
                )
            )
        return found

    def _find_cause(self, comm: Comm, calls: Calls, records: Mapping[int, Record]) -> None:
        """After a call has failed, find out whether that is because the ranks have made different ones."""
        if calls.failure is None:
            self.hear_of_failure(comm, calls)
        if calls.failure is not None:
            return
        own = calls.call(calls.number)
        for record in records.values():
            other = record.call(calls.number)
            if record.failure is not None:
                calls.failure = record.failure
            elif other is not None and other.fingerprint != own.fingerprint and record.resets == calls.resets:
                self._fail(comm, calls)
            if calls.failure is not None:
                return

    def _words(self, rank: int, state: Mapping[str, Any] | None, process: str, record: Record | None) -> str:
        who = self._who_is(rank)
        where = f"process {who['pid']} on {who['host']}" if who else "a process that never said where it runs"
        if state is None:
            return {
                "gone": f"is gone ({where})",
                "stopped": f"does not answer, because it is stopped ({where}; kill -CONT continues it)",
            }.get(process, f"does not answer ({where}{process and '; ' + process})")
        last = "no call in this group"
        if record is not None and record.number:
            last = f"last call {record.number}, {record.call(record.number)}, {record.seconds:.0f} s ago"
        if state["ended"]:
            cause = f" with {state['error']}" if state["error"] else ""
            return f"has ended{cause} ({where}); {last}"
        stack = "".join(f"\n      {line}" for line in state["stack"])
        return f"{last} ({where}); now in{stack}"

    def _who_is(self, rank: int) -> dict[str, Any]:
        if rank not in self._who and self.store.check([f"who/{rank}"]):
            self._who[rank] = json.loads(self.store.get(f"who/{rank}"))
        return self._who.get(rank, {})

    def process(self, rank: int) -> str:
        """Return what the system says of a rank's process: gone, stopped, or another state; "" if it is not here."""
        who = self._who_is(rank)
        if not who or who["host"] != self._host or not Path("/proc/self/stat").exists():
            return ""
        try:
            state = Path(f"/proc/{who['pid']}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return "gone"
        return {"Z": "gone", "X": "gone", "T": "stopped", "t": "stopped"}.get(state, "")


def interrupt(comm: Comm) -> None:
    """Let what the main thread waits for in a group fail."""
    pg = comm.pg
    if pg is None:
        return
    if "cpu" in comm.devices:
        # gloo has no other way: a receive that times out closes all connections of the group (torch 2.13). One from a
        # rank that is gone fails without that.
        for step in range(1, comm.size):
            try:
                pg.recv([torch.empty(1)], (comm.rank + step) % comm.size, 0x10C7).wait(timedelta(milliseconds=1))
            except RuntimeError as error:
                if any(words in str(error) for words in PEER_IS_GONE):
                    continue
            break
    with suppress(Exception):
        if comm.devices - {"cpu"}:
            cast(Any, pg).abort()


def _stack() -> list[str]:
    """Return the innermost frames of the main thread, the innermost first; those of libraries are left out."""
    ident = threading.main_thread().ident
    frame = sys._current_frames().get(ident) if ident is not None else None
    if frame is None:
        return []
    frames = [(one.filename, one.lineno, one.name) for one in traceback.extract_stack(frame)]
    innermost = frames[-1]
    own = [one for one in frames if not one[0].startswith((*_LIBRARIES, "<frozen"))]
    shown = own[-_FRAMES:]
    if innermost not in shown:
        shown.append(innermost)
    return [f'File "{short_path(file)}", line {line}, in {function}' for file, line, function in reversed(shown)]


def _is_waiting(state: Mapping[str, Any] | None) -> bool:
    """Return whether a rank's main thread is where torch or lockstep wait for other ranks, or has waited in vain."""
    if state is not None and state["looks"]:
        return True
    return state is not None and bool(state["stack"]) and any(name in state["stack"][0] for name in _WAITING)


def _heartbeat_seconds() -> float:
    text = os.environ.get(_HEARTBEAT, "30")
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if seconds <= 0:
        raise ValueError(f"{_HEARTBEAT} must be a positive number of seconds, but is {text!r}")
    return seconds
