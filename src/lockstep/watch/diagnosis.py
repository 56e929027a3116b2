"""Makes errors of the answers of ranks: which call differs, who is absent, who waits for whom.

A rank is blocked in a call if other ranks are absent: they have not made the call yet, or run a block in it for which
the rest waits. If all absent ranks are blocked themselves, in a circle, none of them can go on: a deadlock.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from lockstep.calls import Record, first_difference, grouped, unlike_most
from lockstep.errors import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    DistError,
    PeerError,
    caused_by,
    ranks_in_words,
)
from lockstep.groups import Comm
from lockstep.watch.board import Board, State

# A rank that has ended with one of these errors was not the cause: another rank was.
_OF_OTHERS = (f"{PeerError.__name__}:", f"{CollectiveTimeoutError.__name__}:")

_OF_TORCH = ("forward_pass", "backward_pass")  # calls in which torch communicates, after they are recorded
_NOW_IN = "; now in"  # what comes before a stack
_MOST_SHOWN = 16  # places where absent ranks are: each rank that waited shows them
_SECONDS_STILL = 1.5  # a main thread that stays in one line so long waits for its device


class Absent(NamedTuple):
    """A rank that did not arrive.

    Attributes:
        rank: the rank within the group.
        words: what is known about it.
        has_ended: whether its process has ended.
        cause: the error with which it has, if it said so.
    """

    rank: int
    words: str
    has_ended: bool
    cause: str


_ON_ALL_RANKS = (
    "If one of these lines is under a condition such as `if rank == 0`, move it out of there: saving, logging and "
    "evaluating communicate, and are called on every rank; a loop is left in the same iteration on all"
)


def records_of(comm: Comm, states: Mapping[int, State | None]) -> dict[int, Record]:
    """Return the calls of a group's ranks, by rank in the group, as far as they have answered."""
    name, answers = comm.group_name, enumerate(map(states.get, comm.ranks))
    return {rank: Record(one["groups"][name]) for rank, one in answers if one and name in one["groups"]}


def described(comm: Comm, records: Mapping[int, Record], ended: Collection[int]) -> CollectiveMismatchError:
    """Return which call differs first, and what each rank has called."""
    number = first_difference(list(records.values()))
    if number is None:
        kept = min(len(record) for record in records.values())
        return CollectiveMismatchError(
            f"ranks of {comm.name} must make the same calls, but they differ, earlier than in the last {kept}, which "
            "are kept. LOCKSTEP_CHECK=always finds the first difference"
        )
    calls = {rank: record.call(number) for rank, record in records.items()}
    missing = [rank for rank, call in calls.items() if call is None]
    left = [rank for rank in missing if rank in ended]
    lines = {rank: str(call) for rank, call in calls.items()}
    for rank in missing:
        does = "has ended" if rank in ended else "has not called anything more"
        record = records[rank]
        lines[rank] = does + (f", after {record.call(record.number)}" if record.number else "")
    text = f"ranks of {comm.name} must make the same call, but their call {number} differs:\n{grouped(lines)}"
    if left or len({call.site for call in calls.values() if call}) > 1:
        text += f"\n{_ON_ALL_RANKS}"
    fingerprints = {rank: call and call.fingerprint for rank, call in calls.items()}
    failed = [comm.ranks[rank] for rank in left or unlike_most(fingerprints)]
    return CollectiveMismatchError(text, failed_ranks=failed)


def described_if_different(comm: Comm, records: Mapping[int, Record]) -> CollectiveMismatchError | None:
    """Return how the calls of ranks differ, or None if they are the same, or not known to differ."""
    is_known = len({record.resets for record in records.values()}) == 1
    is_same = len({(record.number, record.digest) for record in records.values()}) == 1
    if is_same or not is_known or any(record.has_failed for record in records.values()):
        return None
    return described(comm, records, records)


def what_is_known(ranks: Sequence[int], comm: Comm, states: Mapping[int, State | None], board: Board) -> list[Absent]:
    """Return what is known of ranks that are absent.

    Args:
        ranks: their numbers in the default group.
        comm: the group in which they are absent.
        states: what the ranks have answered.
        board: what it knows of where they run.
    """
    records, found = records_of(comm, states), list[Absent]()
    for rank in ranks:
        own, state = comm.ranks.index(rank), states.get(rank)
        process = board.process(rank) if state is None else ""
        has_ended = process == "gone" or (state is not None and state["ended"])
        words = _words(board.location(rank), state, process, records.get(own))
        found.append(Absent(own, words, has_ended, "" if state is None else str(state["error"])))
    return found


def _words(location: str, state: State | None, process: str, record: Record | None) -> str:
    last = "no call in this group"
    if state is None:
        stopped = f"does not answer, because it is stopped ({location}; kill -CONT continues it)"
        return {"gone": f"is gone ({location})", "stopped": stopped}.get(process, f"does not answer ({location})")
    if record is not None and record.number:
        last = f"last call {record.number}, {record.call(record.number)}, {record.seconds:.0f} s ago"
    if state["ended"]:
        cause = f" with {state['error']}" if state["error"] else ""
        return f"has ended{cause} ({location}); {last}"
    stack = "".join(f"\n      {line}" for line in state["stack"])
    return f"{last} ({location}){_NOW_IN}{stack}"


def absence(
    comm: Comm,
    absent: Sequence[Absent],
    detail: str = "",
    *,
    cause: str = "",
    number: int | None = None,
    is_gone: bool = False,
    is_called_by_torch: bool = False,
    is_cut_off: bool = False,
) -> DistError:
    """Return the error of a call that others did not join; it names them.

    Args:
        comm: the group.
        absent: what is known of them.
        detail: what has shown that they did not come, as a sentence, for where nothing is known of them.
        cause: what the backend says.
        number: that of the call; the last one by default.
        is_gone: one of them has ended, even if `absent` does not have it.
        is_called_by_torch: it was a collective of torch's own, as in DDP's backward pass.
        is_cut_off: the store does not answer.
    """
    number = comm.calls.number if number is None and comm.calls is not None else number
    made = comm.calls.call(number) if comm.calls is not None and number else None
    is_called_by_torch |= made is not None and made.text.partition("(")[0] in _OF_TORCH
    of_torch = "a collective of torch's own" if is_called_by_torch else "a collective"
    call = f"call {number}, {made}," if made is not None else ""
    what = (f"{of_torch} after {call}" if is_called_by_torch else call) if call else of_torch
    ended = [one for one in absent if one.has_ended]
    shown: Sequence[Absent] = [one for one in ended if not one.cause.startswith(_OF_OTHERS)] or ended or absent
    who = f"{ranks_in_words([one.rank for one in shown])} of {comm.name}" if shown else f"a rank of {comm.name}"
    error: DistError
    if ended or (is_gone and not absent):
        text = f"{who} ended or lost the connection during {what} as seen on {comm.this_rank}. Look for "
        text += f"the error there first:\n{lines_of(shown)}" if shown else f"its own error first. {detail}"
        rank, error_there = (shown[0].rank, shown[0].cause) if shown else (None, "")
        error = PeerError(text, rank=rank, cause=error_there or cause)
    else:
        text = f"{who} did not take part in {what} in time"
        hint = "Do all ranks call the same collectives in the same order?"
        if is_cut_off:
            text += ", nor does the store answer at which the ranks met"
            hint = "This host may have lost its network, or that of rank 0."
        text += f" ({comm.this_rank})" + (f":\n{lines_of(shown)}" if shown else f". {hint} {detail}")
        error = CollectiveTimeoutError(text)
    return caused_by(error, [comm.ranks[one.rank] for one in shown]) if shown else error


def lines_of(absent: Sequence[Absent]) -> str:
    """Return what is known of absent ranks, at most at `_MOST_SHOWN` places; of several at one, the first one's."""
    alike: dict[str, list[Absent]] = {}
    for one in absent:
        alike.setdefault(one.words.partition(_NOW_IN)[2] or one.words, []).append(one)
    lines = []
    for first, *others in list(alike.values())[:_MOST_SHOWN]:
        lines.append(f"  rank {first.rank}: {first.words}")
        if others:
            lines.append(f"  {ranks_in_words([one.rank for one in others])}: at the same place")
    if len(alike) > _MOST_SHOWN:
        lines.append(f"  and others at {len(alike) - _MOST_SHOWN} further places")
    return "\n".join(lines)


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


def deadlock(
    states: Mapping[int, State | None], stuck: Mapping[int, list[Blocked]], size: int
) -> CollectiveMismatchError:
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
        where = f"the group of {ranks_in_words([*members])}" if own["ranks"] else f"the default group ({size})"
        inside = f", which is inside {other['inside']}" if other and other["inside"] else ""
        call = Record(own).call(number)
        lines.append(f"  rank {rank}: {call} of {where} waits for {ranks_in_words(absent)}{inside}")
    text = "\n".join(lines)
    return CollectiveMismatchError(
        f"ranks must make the calls of different groups in the same order, but wait for each other:\n{text}",
        failed_ranks=circle,
    )


def _is_absent(state: State | None, group: str, number: int) -> bool:
    own = None if state is None else state["groups"].get(group)
    return own is None or own["number"] < number or (own["number"] == number and bool(own["inside"]))
