"""The end: the calls of all ranks are compared for the last time, so that no job succeeds with unequal ones."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from contextlib import suppress

from lockstep.calls import Failure, Record
from lockstep.errors import error_in_words
from lockstep.groups import known_groups, recorded_groups
from lockstep.watch.watch import POLL_SECONDS, Watch, interrupt, take_watch
from lockstep.watch.words import described, described_if_different, records_of

_SECONDS_TO_END = 2.0
_SECONDS_TO_LINGER = 2.0
_JUDGE = 0  # the rank that compares the calls of all at the end


def end_watch() -> Failure | None:
    """End the watch; return why the calls of the ranks don't agree, if they don't.

    Waits for up to two seconds for the other ranks, unless this one ends because of an error.
    """
    watch = take_watch()
    if watch is None or watch.is_cut_off:
        return None
    try:
        with suppress(Exception):  # the store may be gone
            return _LastComparison(watch).compare()
        return None
    finally:
        watch.stop()


class _LastComparison:
    """What a rank does before it leaves: it tells its calls, and learns whether the others have made the same.

    Args:
        watch: the watch of this rank.
    """

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._groups = recorded_groups()

    def compare(self) -> Failure | None:
        """Compare the calls of all ranks for the last time; return how they differ, if they do."""
        error = sys.exception() or getattr(sys, "last_value", None)
        if error is not None:
            self._watch.error = error_in_words(error).partition("\n")[0]
        has_failed = error is not None or any(calls.has_failed for _, calls in self._groups)
        failure = self._failure()
        self._watch.stop()
        self._watch.store.set(f"state/{self._watch.rank}", json.dumps(self._watch.state(ended=True)))
        self._watch.store.set(f"done/{self._watch.rank}", "failed" if has_failed or failure is not None else "")
        if error is not None:
            # The end of a group waits, until the timeout, for what this rank has begun and others never join.
            for comm in known_groups():
                interrupt(comm)
        try:
            if has_failed or failure is not None:
                return None if has_failed else failure
            if not self._groups:
                if self._watch.rank == _JUDGE:
                    self._watch.store.set("verdict", "")
                return None
            return self._judge() if self._watch.rank == _JUDGE else self._verdict()
        finally:
            self._watch.store.add("left", 1)
            if self._watch.rank == _JUDGE:
                self._linger()

    def _failure(self) -> Failure | None:
        """Return why a group can't be used further, if this rank has heard of it."""
        for comm, calls in self._groups:
            if calls.failure is None:
                self._watch.hear_of_failure(comm, calls)
        return next((calls.failure for _, calls in self._groups if calls.failure is not None), None)

    def _linger(self) -> None:
        """Let the others read what they need: the store may end with this process."""
        deadline = time.monotonic() + _SECONDS_TO_LINGER
        others = [rank for rank in range(self._watch.size) if rank != self._watch.rank]
        while self._watch.store.add("left", 0) < self._watch.size and time.monotonic() < deadline:
            if all(self._watch.process(rank) == "gone" for rank in others):
                return
            time.sleep(POLL_SECONDS)

    def _verdict(self) -> Failure | None:
        """Return what the first rank says of the calls of all ranks."""
        deadline, asked = time.monotonic() + _SECONDS_TO_END + 0.5, False
        while not self._watch.store.check(["verdict"]):
            if (failure := self._failure()) is not None:
                return failure
            left = deadline - time.monotonic()
            if left < 0 or self._watch.process(_JUDGE) == "gone":
                return None
            if not asked and left < _SECONDS_TO_END:
                asked = True
                if (failure := self._awaited([_JUDGE])) is not None:
                    return failure
            time.sleep(POLL_SECONDS)
        verdict = self._watch.store.get("verdict")
        return Failure(*json.loads(verdict)) if verdict else None

    def _judge(self) -> Failure | None:
        """Compare the calls of all ranks, and tell them."""
        verdict = None
        try:
            verdict = self._judged()
        finally:
            self._watch.store.set("verdict", "" if verdict is None else json.dumps(verdict))
        return verdict

    def _judged(self) -> Failure | None:
        others = [rank for rank in range(self._watch.size) if rank != self._watch.rank]
        missing, asked = set(others), False
        deadline = time.monotonic() + _SECONDS_TO_END
        while missing and time.monotonic() < deadline:
            if (failure := self._failure()) is not None:
                return failure
            missing = {rank for rank in missing if not self._watch.store.check([f"done/{rank}"])}
            if any(self._watch.process(rank) == "gone" for rank in missing):
                return None
            if missing and not asked and deadline - time.monotonic() < _SECONDS_TO_END - 0.5:
                asked = True
                if (failure := self._awaited(sorted(missing))) is not None:
                    return failure
            if missing:
                time.sleep(POLL_SECONDS)
        ended = [rank for rank in others if rank not in missing]
        if any(self._watch.store.get(f"done/{rank}") for rank in ended):
            return None
        states = {rank: self._watch.last_word(rank) for rank in ended} | {
            self._watch.rank: self._watch.state(ended=True)
        }
        for comm, _ in self._groups:
            if (difference := described_if_different(comm, records_of(comm, states))) is not None:
                return difference
        return None

    def _awaited(self, ranks: Sequence[int]) -> Failure | None:
        """Return what some ranks wait for that this one, which ends, never calls."""
        states = self._watch.ask(ranks)
        for comm, calls in self._groups:
            for rank, record in records_of(comm, states).items():
                if record.waiting > calls.number and comm.ranks[rank] != self._watch.rank:
                    records = {rank: record, comm.rank: Record(calls.export())}
                    failure = described(comm, dict(sorted(records.items())), {comm.rank: ""})
                    self._watch.declare(comm, failure)
                    return failure
        return None
