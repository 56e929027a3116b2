"""What an error says of the ranks: which call differs, who is absent, and what each one does."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from copy import copy
from typing import NamedTuple

from lockstep.calls import Failure, Record, first_difference, grouped, unlike_most
from lockstep.errors import CollectiveTimeoutError, DistError, PeerError, caused_by, ranks_in_words
from lockstep.groups import Comm
from lockstep.watch.board import State

# A rank that ended with one of these did so because of another one.
_OF_OTHERS = (f"{PeerError.__name__}:", f"{CollectiveTimeoutError.__name__}:")


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


def records_of(comm: Comm, states: Mapping[int, State | None]) -> dict[int, Record]:
    """Return the calls of a group's ranks, by rank in the group, as far as they have answered."""
    name, found = name_of(comm), {}
    for rank, world_rank in enumerate(comm.ranks):
        state = states.get(world_rank)
        if state is not None and name in state["groups"]:
            found[rank] = Record(state["groups"][name])
    return found


def described(comm: Comm, records: Mapping[int, Record], ended: Collection[int]) -> Failure:
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
    return described(comm, records, records)


class Told(Failure):
    """Why a group can't be used further, by an error."""

    _error: DistError

    @classmethod
    def by(cls, error: DistError) -> Told:
        """Return the failure that raises this error."""
        told = cls(str(error))
        told._error = error
        return told

    def error(self) -> DistError:
        """Return the error that says so."""
        return copy(self._error)


def absence(
    comm: Comm,
    absent: Sequence[Absent],
    detail: str = "",
    *,
    cause: str = "",
    number: int | None = None,
    is_gone: bool = False,
    is_of_torch: bool = False,
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
        is_of_torch: it was a collective of torch's own, as in DDP's backward pass.
        is_cut_off: the store does not answer.
    """
    number = comm.calls.number if number is None and comm.calls is not None else number
    of_torch = "a collective of torch's own" if is_of_torch else "a collective"
    call = f"call {number}, {comm.calls.call(number)}," if comm.calls is not None and number else ""
    what = (f"{of_torch} after {call}" if is_of_torch else call) if call else of_torch
    ended = [one for one in absent if one.has_ended]
    shown: Sequence[Absent] = [one for one in ended if not one.cause.startswith(_OF_OTHERS)] or ended or absent
    who = f"{ranks_in_words([one.rank for one in shown])} of {comm.name}" if shown else f"a rank of {comm.name}"
    error: DistError
    if ended or (is_gone and not absent):
        text = f"{who} ended or lost the connection during {what} as seen on {comm.this_rank}. Look for "
        text += f"the error there first:\n{lines_of(shown)}" if shown else f"its own error first. {detail}"
        rank, said = (shown[0].rank, shown[0].cause) if shown else (None, "")
        error = PeerError(text, rank=rank, cause=said or cause)
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
    """Return a line for each rank that is absent."""
    return "\n".join(f"  rank {one.rank}: {one.words}" for one in absent)


def name_of(comm: Comm) -> str:
    """Return the group's name in the keys of the store."""
    pg = comm.pg
    return "" if pg is None else pg.group_name
