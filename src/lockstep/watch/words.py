"""What an error says of the ranks: which call differs, who is absent, and what each one does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from lockstep.calls import Failure, Record, first_difference, grouped, unlike_most
from lockstep.groups import Comm


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


def records_of(comm: Comm, states: Mapping[int, Mapping[str, Any] | None]) -> dict[int, Record]:
    """Return the calls of a group's ranks, by rank in the group, as far as they have answered."""
    name, found = name_of(comm), {}
    for rank, world_rank in enumerate(comm.ranks):
        state = states.get(world_rank)
        if state is not None and name in state["groups"]:
            found[rank] = Record(state["groups"][name])
    return found


def described(comm: Comm, records: Mapping[int, Record], ended: Mapping[int, str]) -> Failure:
    """Return which call differs first, and what each rank has called."""
    number = first_difference(list(records.values()))
    if number is None:
        kept = min(len(record) for record in records.values())
        return Failure(
            f"ranks of {comm.name} must make the same calls, but they differ, earlier than in the last {kept}, which "
            "are kept. LOCKSTEP_CHECK=always finds the first difference"
        )
    lines, fingerprints = {}, dict[int, int | None]()
    left = [rank for rank, record in records.items() if rank in ended and record.call(number) is None]
    for rank, record in records.items():
        call = record.call(number)
        fingerprints[rank] = None if call is None else call.fingerprint
        if call is not None:
            lines[rank] = str(call)
        else:
            does = "has ended" if rank in ended else "has not called anything more"
            last = f", after {record.call(record.number)}" if record.number else ""
            lines[rank] = f"{does}{last}"
    text = f"ranks of {comm.name} must make the same call, but their call {number} differs:\n{grouped(lines)}"
    return Failure(text, [comm.ranks[rank] for rank in left or unlike_most(fingerprints)])


def described_if_different(comm: Comm, records: Mapping[int, Record]) -> Failure | None:
    """Return how the calls of ranks differ, or None if they are the same, or not known to differ."""
    if len(records) < 2 or len({record.resets for record in records.values()}) > 1:
        return None
    if any(record.failure is not None for record in records.values()):
        return None
    if len({record.number for record in records.values()}) == len({record.digest for record in records.values()}) == 1:
        return None
    return described(comm, records, dict.fromkeys(records, ""))


def lines_of(absent: Sequence[Absent]) -> str:
    """Return a line for each rank that is absent."""
    return "\n".join(f"  rank {one.rank}: {one.words}" for one in absent)


def name_of(comm: Comm) -> str:
    """Return the group's name in the keys of the store."""
    pg = comm.pg
    return "" if pg is None else pg.group_name
