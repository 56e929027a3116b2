"""The board: ranks ask each other what they do, through the store at which they met, because their groups may hang.

Keys of a rank r: `who/r` (host and process), `asked/r` (number of the last question to it), `answered/r` (number of the
last question that it has answered, `_ENDED` after its end), `state/r` (the answer). A rank makes one request to the
store each time that it looks for a question, and some thirty at most for each question that it asks: their number
grows by the logarithm of the number of ranks for each rank that has no board.
The store's own waits are not used, because torch prints a warning for each one that times out (2.13).
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from threading import Lock
from typing import Any, TypeAlias, cast

from torch.distributed import Store

from lockstep.topology.pid_namespace import pid_namespace, stat_of

State: TypeAlias = Mapping[str, Any]
"""What a rank does, as `Watch.state` says it."""

_RANKS_PER_SECOND = 1000  # so many may look at the store; its answer to one takes about 20 microseconds
_SHORTEST = 0.25  # seconds from one look at the store to the next
_ENDED = 2**62


class Board:
    """The questions and answers of ranks; each rank has one board.

    Args:
        store: the store at which the ranks met.
        rank: this rank, in the default group.
        size: the number of ranks.
        state: a function that returns what this rank does.

    Attributes:
        tick: seconds from one look at the store to the next.
        answered: number of the last question that this rank has answered.
        seconds_to_answer: after which nobody waits for an answer any longer.
    """

    def __init__(self, store: Store, rank: int, size: int, state: Callable[[], State]) -> None:
        self.store = cast("Any", store)  # torch's stubs lack `multi_set`
        self.rank, self.size = rank, size
        self.tick = max(_SHORTEST, size / _RANKS_PER_SECOND)
        self.seconds_to_answer = 1.25 + self.tick
        self.answered = self._asked = -1
        self._state, self._lock = state, Lock()
        self._namespace = pid_namespace()
        self._who: dict[int, dict[str, Any]] = {}
        who = json.dumps({"host": socket.gethostname(), "namespace": self._namespace, "pid": os.getpid()})
        first = {"asked": "0", "answered": "-1", "state": "null", "who": who}  # other ranks check for the last key
        self.store.multi_set([f"{key}/{rank}" for key in first], list(first.values()))

    def answer(self) -> None:
        """Publish what this rank does, if another rank has asked since the last answer."""
        with self._lock:
            asked = int(self.store.get(f"asked/{self.rank}"))
            if asked != self._asked and self.answered < _ENDED:
                self._asked = asked
                number = self.store.add("asks", 0)  # a later question may have been overwritten by an earlier one
                self._publish(self._state(), number)

    def end(self, state: State) -> None:
        """Publish the final state of this rank."""
        with self._lock:
            self._publish(state, _ENDED)

    def notify(self, ranks: Sequence[int]) -> int:
        """Ask ranks without waiting for answers; return the number of the question."""
        number: int = self.store.add("asks", 1)
        if ranks:
            self.store.multi_set([f"asked/{rank}" for rank in ranks], [str(number)] * len(ranks))
        return number

    def ask(self, ranks: Iterable[int]) -> dict[int, State | None]:
        """Return what ranks do; None for one that does not answer."""
        answers: dict[int, State | None] = dict.fromkeys(ranks)
        waiting = [rank for rank in self._known(answers) if rank != self.rank]
        number = self.notify(waiting)
        for _ in pauses(self.seconds_to_answer, self.tick):
            self.answer()  # somebody may be asking this rank
            last = self._read("answered", waiting)
            answers |= self._read("state", [rank for rank in waiting if last[rank] >= number])
            waiting = [rank for rank in waiting if last[rank] < number and not self.process(rank)]
            if not waiting:
                break
        if self.rank in answers:
            answers[self.rank] = self._state()
        return answers

    def last_states(self, ranks: Iterable[int]) -> dict[int, State]:
        """Return the final states of those ranks that have ended."""
        answered = self._read("answered", self._known(ranks))
        return self._read("state", [rank for rank, last in answered.items() if last == _ENDED])

    def missing(self) -> list[int]:
        """Return the other ranks that have not published a final state."""
        others = [rank for rank in range(self.size) if rank != self.rank]
        answered = self._read("answered", self._known(others))
        return [rank for rank in others if answered.get(rank) != _ENDED]

    def location(self, rank: int) -> str:
        """Return in words where a rank runs."""
        who = self._who.get(rank)
        return f"process {who['pid']} on {who['host']}" if who else "a process that never said where it runs"

    def process(self, rank: int) -> str:
        """Return "gone" or "stopped" for such a process of a rank in this host or container; "" for any other."""
        who = self._who.get(rank)
        if not who or who["namespace"] != self._namespace or not Path("/proc/self/stat").exists():
            return ""
        state = next(iter(stat_of(who["pid"])), "X")
        if state == "X" and os.path.exists(f"/proc/{who['pid']}"):  # it could not be read: no file descriptor is free
            return ""
        return {"Z": "gone", "X": "gone", "T": "stopped", "t": "stopped"}.get(state, "")

    def gone(self, ranks: Iterable[int]) -> list[int]:
        """Return which ranks are gone from this host, or from this container."""
        return [rank for rank in self._known(ranks) if self.process(rank) == "gone"]

    def _known(self, ranks: Iterable[int]) -> list[int]:
        """Return the ranks that have a board, and read where they run."""
        ranks = list(ranks)
        self._who |= self._read("who", self._with_board([rank for rank in ranks if rank not in self._who]))
        return [rank for rank in ranks if rank in self._who]

    def _with_board(self, ranks: list[int]) -> list[int]:
        if not ranks or self.store.check([f"who/{rank}" for rank in ranks]):
            return ranks
        half = len(ranks) // 2  # of 1,000 ranks, one that has none is found by some 20 requests
        return [*self._with_board(ranks[:half]), *self._with_board(ranks[half:])] if half else []

    def _read(self, key: str, ranks: Sequence[int]) -> dict[int, Any]:
        texts = self.store.multi_get([f"{key}/{rank}" for rank in ranks]) if ranks else []
        return dict(zip(ranks, map(json.loads, texts), strict=True))

    def _publish(self, state: State, number: int) -> None:
        self.answered = number
        self.store.multi_set([f"state/{self.rank}", f"answered/{self.rank}"], [json.dumps(state), str(number)])


def pauses(seconds: float, longest: float) -> Iterator[float]:
    """Yield at once, then after pauses that double up to the longest one: the seconds up to the last pause."""
    begun, pause = time.monotonic(), longest / 64
    yield 0.0
    while (passed := time.monotonic() - begun) < seconds:
        time.sleep(min(pause, seconds - passed))
        pause = min(2 * pause, longest)
        yield passed
