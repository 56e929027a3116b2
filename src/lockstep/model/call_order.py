"""Checking that all ranks call the same parts of a model in the same order, if each call is a collective."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from lockstep.calls import unlike_most
from lockstep.dist import all_gather, get_world_size
from lockstep.dist.consistency import check_mode
from lockstep.errors import PeerError, caused_by, ranks_in_words

# After the first passes of each kind, every fiftieth is compared.
_EVERY = 50
_END, _FAILED = -1, -2
_BACKWARD = -10  # and below: a backward pass begins; what is below is the digest of what it will reach
_WHOLE = 2**40  # and above: a pass ends; what is above is the digest of the units that it has called


class CallOrder:
    """Compares, across ranks, which units of a model a forward pass calls.

    FSDP and stage 3 of ZeRO gather the parameters of a unit by collectives that carry no names: ranks that call
    different units get a mixture of both, or wait for each other forever. In the first forward passes of each kind, and
    in all of them after `check_collectives("always")`, the same small exchange precedes each call of a unit and the end
    of the pass, so that ranks that diverge meet there. Of the others every fiftieth is compared, by one exchange at its
    end, before a mixture could be used for an update.

    Args:
        names: names of the units, the same on all ranks; the whole model's name is empty.
        rule: what all ranks must do; the beginning of an error message.
        remedy: what to do; the end of an error message.
        error: the class of the error.
        first: how many passes of each kind are compared call by call, before only every fiftieth is compared.
        mesh: the ranks, along one axis or several; by default all.

    Attributes:
        groups: the groups of the mesh's axes; collectives over one after the other reach all ranks.
        has_peers: whether there are several ranks.
        is_sampled: whether the present pass is one of those that are compared if there are several ranks.
        is_compared: whether the present pass is compared.

    **Cost**: an exchange of eight bytes, in the first passes for each call, later for each compared pass.
    """

    def __init__(
        self,
        names: Sequence[str],
        *,
        rule: str,
        remedy: str,
        error: type[Exception],
        first: int,
        mesh: DeviceMesh | None = None,
    ) -> None:
        # From the last axis to the first, so that gathered values are in the order of the mesh.
        axes = [] if mesh is None else [axis for axis in reversed(range(mesh.ndim)) if mesh.size(axis) > 1]
        self.groups = [None] if mesh is None else [mesh.get_group(axis) for axis in axes]
        self._ranks: Sequence[int] = range(get_world_size()) if mesh is None else mesh.mesh.flatten().tolist()
        self._names, self._rule, self._remedy, self._error, self._first = names, rule, remedy, error, first
        self._counts: Counter[str] = Counter()
        self._last = ""
        self._called: list[int] = []
        self._meets_at_calls = False
        self.has_peers = len(self._ranks) > 1
        self.is_sampled = self.is_compared = False

    @contextmanager
    def compared(self) -> Iterator[None]:
        """Run a forward pass inside, and compare it if it is due.

        **Collective**: every rank.
        """
        self.begin("forward")
        try:
            yield
        except BaseException:
            self.end(failed=True)
            raise
        else:
            self.end(failed=False)
        finally:
            self.is_compared = False

    def begin(self, kind: str) -> None:
        """Count a forward pass of a kind."""
        self._meets_at_calls = self._counts[kind] < self._first or check_mode() == "always"
        self._called = []
        self.is_sampled = self.samples(kind)
        self.is_compared = self.has_peers and self.is_sampled
        self._last = ""

    def call(self, index: int) -> None:
        """Note that a unit is called; in the first passes, meet the other ranks before.

        Raises:
            Exception: of class `error`, on every rank, if ranks call different units or some end the pass.
            PeerError: if another rank has failed in the pass.
        """
        if not self._meets_at_calls:
            self._called.append(index)
            return
        self._meet(index)
        self._last = self._names[index]

    def end(self, *, failed: bool) -> None:
        """Meet the other ranks at the end of a pass; raises as `call` does."""
        if failed or self._meets_at_calls:
            self._meet(_FAILED if failed else _END)
        else:
            self._meet(_WHOLE + zlib.crc32(repr(self._called).encode()))

    def samples(self, kind: str) -> bool:
        """Count a pass of a kind, and return whether it must be compared if there are several ranks."""
        number = self._counts[kind]
        self._counts[kind] += 1
        return number < self._first or number % _EVERY == 0 or check_mode() == "always"

    def from_all(self, row: Tensor) -> Tensor:
        """Return every rank's row, in the order of the mesh. **Collective**: every rank."""
        table = row.unsqueeze(0)
        for group in self.groups:
            table = torch.cat(all_gather(table, group))
        return table

    def ranks_with(self, value: object, values: Sequence[object]) -> str:
        """Return which ranks have a value, as text."""
        return ranks_in_words([rank for rank, other in zip(self._ranks, values, strict=True) if other == value])

    def unlike_most(self, values: Sequence[Hashable]) -> list[int]:
        """Return the ranks whose value differs from that of most, or from the first one if there is no majority."""
        return [self._ranks[place] for place in unlike_most(dict(enumerate(values)))]

    def _meet(self, event: int) -> None:
        if not self.is_compared:
            return
        events: list[int] = self.from_all(torch.tensor([event])).flatten().tolist()
        if all(other == event for other in events) and event != _FAILED:
            return
        self.is_compared = False
        if event == _FAILED:  # this rank already raises its own error
            return
        if min(events) >= _WHOLE:
            events = self._first_difference()
        raise self._mismatch(events)

    def _first_difference(self) -> list[int]:
        """Return what each rank did where the passes, which have ended, differ first. **Collective**: every rank."""
        longest = int(self.from_all(torch.tensor([len(self._called)])).max())
        row = [*self._called, *[_END] * (longest + 1 - len(self._called))]
        columns: list[list[int]] = self.from_all(torch.tensor(row)).T.tolist()
        place = next(place for place, column in enumerate(columns) if len(set(column)) > 1)
        self._last = self._names[row[place - 1]] if place else ""
        return columns[place]

    def _mismatch(self, events: Sequence[int]) -> Exception:
        if _FAILED in events:
            rank = self._ranks[events.index(_FAILED)]
            return PeerError(
                f"this rank can't go on, because rank {rank} failed in the forward pass: see its own error",
                rank=rank,
                cause="an error in the forward pass",
            )
        does = " and ".join(
            f"{self._in_words(other)} on {self.ranks_with(other, events)}" for other in dict.fromkeys(events)
        )
        last = f" after `{self._last}`" if self._last else ""
        error = self._error(f"{self._rule}, but the forward pass {does}{last}. {self._remedy}")
        return caused_by(error, self.unlike_most(events))

    def meet_in_backward(self, digest: int) -> bool:
        """Meet the other ranks before a backward pass, and return whether all have the same digest of 32 bits.

        Raises:
            Exception: of class `error`, on every rank, if some are in a forward pass.
            PeerError: as for `call`.
        """
        events: list[int] = self.from_all(torch.tensor([_BACKWARD - digest])).flatten().tolist()
        if any(other > _BACKWARD for other in events):
            raise self._mismatch(events)
        return len(set(events)) == 1

    def _in_words(self, event: int) -> str:
        if event <= _BACKWARD:
            return "is left out before a backward pass"
        if event == _END or event >= _WHOLE:
            return "ends"
        return f"calls `{self._names[event]}`" if self._names[event] else "calls the whole"
