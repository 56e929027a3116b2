"""Finds out who has not come to a call that does not end, or has failed: late, gone, or waiting for others itself."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from torch.distributed import GroupMember, Store

from lockstep.calls import Calls
from lockstep.errors import CollectiveMismatchError, DistError
from lockstep.groups import Comm, failure_of_any, recorded_groups
from lockstep.watch.board import Board, State, pauses
from lockstep.watch.diagnosis import (
    Absent,
    absence,
    absent_ranks,
    deadlock,
    described,
    records_of,
    stuck_ranks,
    what_is_known,
)
from lockstep.watch.interrupt import interrupt, let_graphs_be_captured
from lockstep.watch.main_thread import is_waiting, stack_of_main_thread

_logger = logging.getLogger("lockstep.dist")
_SECONDS_TO_ASK_AGAIN = 5.0  # a store that has not answered
_SECONDS_TO_CONFIRM = 0.5  # after which ranks that wait for each other are asked again


class WatchOfRank:
    """What the watch of a rank knows of groups that can't be used further, and tells others; the base of `Watch`.

    Attributes:
        board: where ranks ask each other.
        error: the error with which this rank ends; empty while it goes on.
        calls_at_search: the last calls of this rank when it searched for absent ones; None if it did not.
        cut_off_since: since when the store has not answered, by the monotonic clock; None while it answers.
        stopping: set when the thread is to end.
    """

    _thread: threading.Thread

    def __init__(self, rank: int, size: int, store: Store) -> None:
        self.rank, self.size, self.store = rank, size, store
        self.error = ""
        self.cut_off_since: float | None = None
        self.calls_at_search: list[tuple[int, int]] | None = None
        self._to_interrupt: list[tuple[Comm, Calls]] = []  # groups of which another thread has learnt that they fail
        self.stopping = threading.Event()
        self._still_since = time.monotonic()  # when the main thread has come to where it is
        self._aborted: Calls | None = None  # the record of a group whose call on a device was aborted
        self.board = Board(store, rank, size, self.state)

    @property
    def is_cut_off(self) -> bool:
        """Whether the store does not answer."""
        return self.cut_off_since is not None

    def cut_off(self) -> None:
        """Note that the store does not answer; a thread then asks until it does."""
        if self.cut_off_since is None:
            self.cut_off_since = time.monotonic()
            threading.Thread(target=self._ask_again, name="lockstep-ask-again", daemon=True).start()

    def _ask_again(self) -> None:
        """Ask the store until it answers. Each time may last for as long as its host is stopped or has no network."""
        while not self.stopping.wait(_SECONDS_TO_ASK_AGAIN):
            with suppress(Exception):  # the connection is broken, or the store is gone
                self.store.check(["who/0"])
                self.cut_off_since = None
                return

    def state(self, *, ended: bool = False) -> dict[str, Any]:
        """Return what this rank does."""
        return {
            "groups": {comm.group_name: _exported(comm, calls) for comm, calls in recorded_groups()},
            "stack": [] if ended else stack_of_main_thread(),
            "still": time.monotonic() - self._still_since,
            "ended": ended,
            "error": self.error,
            # A collective has failed here, because of another rank, and none was called since: it is not late.
            "looks": self.calls_at_search == _calls_made(),
        }

    def hear(self) -> DistError | None:
        """Return the error that says why a group can't be used further, if this rank has heard of it."""
        heard = []
        for comm, calls in recorded_groups():
            key = f"failure/{comm.group_name}"
            if calls.failure is None and self.store.check([key]):
                kind, *values = json.loads(self.store.get(key))
                if kind == "gone":
                    calls.failure = absence(comm, [Absent(*one) for one in values])
                else:
                    calls.failure = CollectiveMismatchError(values[0], failed_ranks=values[1])
                heard.append((comm, calls, calls.failure))
        for one in heard:  # the main thread goes on when all are known
            self.fail(*one)
        return failure_of_any()

    def declare(self, group: str, ranks: Sequence[int], values: Sequence[object], kind: str = "calls") -> None:
        """Tell the ranks of a group why it can't be used further.

        Args:
            group: its name.
            ranks: its ranks.
            values: what is known of ranks that are absent; of a mismatch, the message and the ranks that failed.
            kind: `calls` for a mismatch, `gone` for ranks that are absent.
        """
        self.store.set(f"failure/{group}", json.dumps([kind, *values]))
        self.board.notify([rank for rank in ranks if rank != self.rank])

    def fail(self, comm: Comm, calls: Calls, error: DistError) -> None:
        """Let this rank's call in a group fail, and all later ones."""
        calls.failure = calls.failure or error
        self._to_interrupt.append((comm, calls))
        if threading.current_thread() is self._thread:
            self.interrupt_failed()

    def interrupt_failed(self) -> None:
        """End what this rank still does in groups that have failed; only the watch's own thread does it."""
        while self._to_interrupt:
            comm, calls = self._to_interrupt.pop(0)
            if calls.unfinished()[0] and not calls.has_failed:
                self.interrupt(comm, calls)

    def interrupt(self, comm: Comm, calls: Calls) -> None:
        """Make the collectives of a group fail, also torch's own."""
        if calls.unfinished()[0] and not calls.waiting:
            self._aborted, self._still_since = calls, time.monotonic()  # from now on the main thread can leave it
        interrupt(comm)

    def fail_all(self, comm: Comm, calls: Calls, states: Mapping[int, State | None]) -> None:
        """Let all ranks of a group fail, as they differ, by what they do; the error names the first such call."""
        if calls.failure is None:
            ended = [rank for rank, one in enumerate(comm.ranks) if (states[one] or {}).get("ended")]
            error = described(comm, records_of(comm, states), ended)
            self.declare(comm.group_name, comm.ranks, [str(error), error.failed_ranks])
            self.fail(comm, calls, error)


@dataclass(frozen=True)
class AbsentSearch:
    """A search for the ranks that have not made a call which this rank has made.

    Attributes:
        watch: the watch of this rank.
        comm: the group.
        calls: its record on this rank.
        number: that of the call.
        in_call: this rank is still in the call. If it leaves it meanwhile, nobody is absent.
        is_lost: a device has lost the connection to a rank, so that it is one that is gone or does not answer. Others
            may be behind, because hosts run ahead of their devices by different numbers of calls.
    """

    watch: WatchOfRank
    comm: Comm
    calls: Calls
    number: int
    in_call: bool = False
    is_lost: bool = False

    @property
    def has_left(self) -> bool:
        """Whether this rank was in the call, and has left it since."""
        return self.in_call and self.calls.unfinished()[0] != self.number

    def find(self) -> list[Absent]:
        """Return who is absent from a call that has failed, or what the system knows, if the store is silent.

        Where the network is gone, it is silent for a quarter of an hour.
        """
        watch = self.watch
        watch.calls_at_search = _calls_made()
        found: Future[list[Absent]] = Future()

        def find() -> None:
            let_graphs_be_captured(self.calls.device_index)
            try:
                found.set_result(self.find_by_one_rank())
            except Exception as error:
                found.set_exception(error)

        if not watch.is_cut_off:
            threading.Thread(target=find, name="lockstep-find-absent", daemon=True).start()
            try:
                # A rank may begin to ask by itself when it has waited for another one's answer in vain.
                return found.result(self._seconds_to_find + watch.board.seconds_to_answer + 0.4)
            except (TimeoutError, RuntimeError):  # torch's stores raise RuntimeError and its subclasses
                watch.cut_off()
            except Exception:
                _logger.exception("who is absent from a call could not be found out")
        return self._known_to_be_gone()

    def find_by_one_rank(self) -> list[Absent]:
        """Ask who is absent from a call that has failed, on one of the ranks in it; wait for its answer on the others.

        The answer is the same for all of them, because they are in the same call, or have lost the same rank. So
        requests grow with the ranks, not with their square.
        """
        watch, calls = self.watch, self.calls
        key = f"absent/{self.comm.group_name}/{calls.resets}/{'device' if self.is_lost else self.number}"
        answer = json.loads(watch.store.compare_set(key, "", str(watch.rank)))
        for _ in pauses(self._seconds_to_find, watch.board.tick):
            if isinstance(answer, list):
                watch.hear()
                return [] if calls.failure is not None else [Absent(*one) for one in answer]
            if answer == watch.rank or watch.board.gone([answer]):
                found = self.ask(has_failed=True)
                # A failure is heard by itself. If this rank has left the call, its main thread asks, or has asked.
                if found or not (self.has_left or calls.failure):
                    watch.store.set(key, json.dumps(found))
                return found
            watch.board.answer()
            watch.hear()
            if calls.failure is not None:
                return []
            answer = json.loads(watch.store.get(key))
        return self._known_to_be_gone()

    def ask(self, *, has_failed: bool = False) -> list[Absent]:
        """Ask all ranks of the group what they do, and return who is absent.

        Where the call can never end, because the ranks have made different ones, or wait for each other, the group
        fails; unless the call has failed by itself, also where a rank is gone.

        Args:
            has_failed: the call's time is over, or the backend has raised an error.
        """
        watch, comm, calls, number = self.watch, self.comm, self.calls, self.number
        states = watch.board.ask(comm.ranks)
        if has_failed and watch.is_cut_off:
            return []  # nobody waits for this any longer
        watch.hear()
        if calls.failure is not None or self.has_left:
            return []
        others = {rank: states[rank] for rank in comm.ranks if rank != watch.rank}
        records = {comm.ranks[rank]: record for rank, record in records_of(comm, states).items()}
        for rank, state in others.items():
            record = records.get(rank)
            if number and record is not None and state is not None and record.resets == calls.resets:
                call = record.call(number)
                has_gone_on = state["ended"] and not state["error"] and record.number < number
                own = calls.call(number)  # None where the record has begun anew meanwhile
                if own and (has_gone_on or (call is not None and call.fingerprint != own.fingerprint)):
                    watch.fail_all(comm, calls, states)
                    return []
        if not has_failed:
            dead = [x for x, state in others.items() if (state["error"] if state else watch.board.process(x) == "gone")]
            if dead:
                found = self._known(dead, states)
                watch.declare(comm.group_name, comm.ranks, found, "gone")
                watch.fail(comm, calls, absence(comm, found, number=number))
                return []
            self._find_deadlock(states)
        if self.is_lost:
            return self._known([x for x, one in others.items() if not one or one["ended"]], states)
        absent = [x for x, state in others.items() if state is None or x not in records or records[x].number < number]
        # Those that have made the call, and then ended, may have done so because of others. torch's own collectives are
        # not recorded: whoever is not in one of them is late.
        absent = absent or [x for x, state in others.items() if state and state["ended"]]
        absent = absent or [x for x, state in others.items() if state and not is_waiting(state)]
        return self._known(absent, states)

    @property
    def _seconds_to_find(self) -> float:
        return self.watch.board.seconds_to_answer + 2 * self.watch.board.tick

    def _known(self, ranks: list[int], states: dict[int, State | None]) -> list[Absent]:
        return what_is_known(ranks, self.comm, states, self.watch.board)

    def _known_to_be_gone(self) -> list[Absent]:
        """Return the ranks of the group that have ended on this host, which the system knows without the store."""
        return self._known([x for x in self.comm.ranks if self.watch.board.process(x) == "gone"], {})

    def _find_deadlock(self, states: dict[int, State | None]) -> None:
        """Find out whether ranks wait for each other in calls of different groups, and let these fail."""
        watch = self.watch
        while new := absent_ranks(states, watch.size).difference(states):
            states |= watch.board.ask(sorted(new))
        stuck = stuck_ranks(states, watch.size)
        if not stuck or watch.stopping.wait(_SECONDS_TO_CONFIRM):
            return
        states = watch.board.ask(states)
        again = stuck_ranks(states, watch.size)
        if all(again.get(rank) == calls for rank, calls in stuck.items()):
            error = deadlock(states, stuck, watch.size)
            for name, members in {(call.group, call.members) for calls in stuck.values() for call in calls}:
                watch.declare(name, members, [str(error), error.failed_ranks])
            watch.hear()


def _calls_made() -> list[tuple[int, int]]:
    """Return which calls this rank has made last in its groups."""
    return [(calls.resets, calls.number) for _, calls in recorded_groups() if calls.resets or calls.number]


def _exported(comm: Comm, calls: Calls) -> dict[str, Any]:
    """Return a group's record as the other ranks need it."""
    ranks = None if comm.pg is GroupMember.WORLD else comm.ranks
    return calls.export() | {"on_host": calls.waiting > 0, "inside": calls.inside, "ranks": ranks}
