"""Ranks that wait for each other in calls of different groups, by what all of them say that they do.

A rank is blocked in a call that others have not made yet, or in which they run a block that the rest waits for. Blocked
ranks all of whose absent ones are blocked, too, can't go on, whatever their calls wait for: that is no matter of time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from lockstep.calls import Failure, Record
from lockstep.errors import ranks_in_words
from lockstep.watch.board import State

_SECONDS_STILL = 1.5  # of a main thread at one place, which then waits for its device


class Blocked(NamedTuple):
    """A call in which a rank waits for others.

    Attributes:
        group: the name of the group.
        members: its ranks in the default group.
        number: that of the call.
        absent: which members have not made it, or are inside its block.
    """

    group: str
    members: tuple[int, ...]
    number: int
    absent: tuple[int, ...]


def blocked_ranks(states: Mapping[int, State | None], size: int) -> dict[int, list[Blocked]]:
    """Return in which calls ranks wait for others.

    Args:
        states: what ranks do, by rank in the default group; one that is not here counts as absent.
        size: the number of all ranks.
    """
    blocked = dict[int, list[Blocked]]()
    for rank, state in states.items():
        if state is None or state["ended"]:
            continue
        for name, own in state["groups"].items():
            if own["waiting"] and (own["on_host"] or state["still"] >= _SECONDS_STILL):
                members = tuple(own["ranks"] or range(size))
                absent = tuple(x for x in members if x != rank and _is_absent(states.get(x), name, own["waiting"]))
                if absent:
                    blocked.setdefault(rank, []).append(Blocked(name, members, own["waiting"], absent))
    return blocked


def absent_ranks(states: Mapping[int, State | None], size: int) -> set[int]:
    """Return for which ranks others wait."""
    return {rank for calls in blocked_ranks(states, size).values() for call in calls for rank in call.absent}


def stuck_ranks(states: Mapping[int, State | None], size: int) -> dict[int, list[Blocked]]:
    """Return those of the blocked ranks that can't go on."""
    stuck = blocked_ranks(states, size)
    while free := [rank for rank, calls in stuck.items() if any(x not in stuck for one in calls for x in one.absent)]:
        for rank in free:
            del stuck[rank]
    return stuck


def deadlock(states: Mapping[int, State | None], stuck: Mapping[int, list[Blocked]], size: int) -> Failure:
    """Return which stuck ranks wait for each other, in which calls."""
    rank, passed = min(stuck), list[int]()
    while rank not in passed:
        passed.append(rank)
        rank = stuck[rank][0].absent[0]
    circle = sorted(passed[passed.index(rank) :])
    lines = []
    for rank in circle:
        group, members, number, absent = stuck[rank][0]
        own, other = ((states[x] or {})["groups"].get(group) for x in (rank, absent[0]))
        where = f"the group of ranks {str([*members])[1:-1]}" if own["ranks"] else f"the default group ({size})"
        inside = f", which is inside {other['inside']}" if other and other["inside"] else ""
        call = Record(own).call(number)
        lines.append(f"  rank {rank}: {call} of {where} waits for {ranks_in_words(absent)}{inside}")
    text = "\n".join(lines)
    return Failure(
        f"ranks must make the calls of different groups in the same order, but wait for each other:\n{text}", circle
    )


def _is_absent(state: State | None, group: str, number: int) -> bool:
    own = None if state is None else state["groups"].get(group)
    return own is None or own["number"] < number or (own["number"] == number and bool(own["inside"]))
