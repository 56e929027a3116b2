"""Checking that all ranks call the same parts of a model in the same order, if each call is a collective."""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest

import torch
from torch.distributed.device_mesh import DeviceMesh

from lockstep.calls import unlike_most
from lockstep.dist import get_world_size
from lockstep.dist.agreement import Sampled, from_all
from lockstep.dist.consistency import check_mode
from lockstep.errors import PeerError, caused_by, ranks_in_words

EVERY = 50
"""After the first passes of each kind, every one of so many is compared."""
# What a forward pass does, as messages say it.
_ENDS, _FAILS, _BACKWARD = "ends", "fails", "is left out before a backward pass"


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
        is_sampled: whether the present pass is due to be compared, which happens only if there are several ranks.
        is_compared: whether the present pass is compared, and no rank has gone another way yet.

    **Cost**: an exchange between the hosts over each axis of the mesh, in the first passes for each call, later for
    each compared pass.
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
        self._schedules = defaultdict[str, Sampled](lambda: Sampled(first, EVERY))  # by kind of pass
        self._last = ""
        self._called: list[str] = []
        self._meets_at_calls = False
        self.has_peers = len(self._ranks) > 1
        self.is_sampled = self.is_compared = False

    @contextmanager
    def compared(self) -> Iterator[bool]:
        """Run a forward pass inside, and compare it if it is due; give whether it would be if there were several ranks.

        **Collective**: every rank.
        """
        self.begin()
        failed = True
        try:
            yield self.is_sampled
            failed = False
        finally:
            self.end(failed=failed)
            self.is_compared = False

    def begin(self) -> None:
        """Count a forward pass: those of a validation apart, which must not use up the first ones of the training."""
        kind = "with gradients" if torch.is_grad_enabled() else "without gradients"
        self._meets_at_calls = self._schedules[kind].count < self._first or check_mode() == "always"
        self._called = []
        self.is_sampled = self.samples(kind)
        self.is_compared = self.has_peers and self.is_sampled
        self._last = ""

    def call(self, index: int, digest: int = 0) -> bool:
        """Note that a unit is called; in the first passes, meet the other ranks before.

        Returns:
            Whether all ranks have the same digest, as far as they have met.

        Raises:
            Exception: of class `error`, on every rank, if ranks call different units or some end the pass.
            PeerError: if another rank has failed in the pass.
        """
        does = f"calls `{self._names[index]}`" if self._names[index] else "calls the whole"
        if not self._meets_at_calls:
            self._called.append(does)
            return True
        is_same = self._meet(does, digest)
        self._last = does
        return is_same

    def end(self, *, failed: bool) -> None:
        """Meet the other ranks at the end of a pass; raises as `call` does."""
        if failed and not self._meets_at_calls:  # the others gather units, and a device may let them come to no end
            return
        self._meet(_FAILS if failed else _ENDS, zlib.crc32(repr(self._called).encode()))

    def samples(self, kind: str) -> bool:
        """Count a pass of a kind, and return whether it must be compared if there are several ranks."""
        return self._schedules[kind].is_due() or check_mode() == "always"

    def ranks_with(self, value: object, values: Sequence[object]) -> str:
        """Return which ranks have a value, as text."""
        return ranks_in_words([rank for rank, other in zip(self._ranks, values, strict=True) if other == value])

    def unlike_most(self, values: Sequence[Hashable]) -> list[int]:
        """Return the ranks whose value differs from that of most, or from the first one if there is no majority."""
        return [self._ranks[place] for place in unlike_most(dict(enumerate(values)))]

    def meet_in_backward(self, digest: int) -> bool:
        """Meet the other ranks before a backward pass, and return whether all have the same digest.

        Raises:
            Exception: of class `error`, on every rank, if some are in a forward pass.
            PeerError: as for `call`.
        """
        events = from_all((_BACKWARD, digest), self.groups)
        if any(does != _BACKWARD for does, _ in events):
            raise self._mismatch([does for does, _ in events])
        return len(set(events)) == 1

    def _meet(self, does: str, digest: int = 0) -> bool:
        """Meet the other ranks, and return whether all have the same digest; raises as `call` does."""
        if not self.is_compared:
            return True
        events = from_all((does, digest), self.groups)
        if len(set(events)) == 1 and does != _FAILS:
            return True
        self.is_compared = False
        done = [other for other, _ in events]
        if does == _FAILS or (does != _ENDS and len(set(done)) == 1):  # this rank already raises its own error, or will
            return False
        raise self._mismatch(self._first_difference() if set(done) == {_ENDS} else done)

    def _first_difference(self) -> list[str]:
        """Return what each rank did where the passes, which have ended, differ first. **Collective**: every rank."""
        for done in zip_longest(*from_all(self._called, self.groups), fillvalue=_ENDS):
            if len(set(done)) > 1:
                break
            self._last = done[0]
        return list(done)

    def _mismatch(self, done: Sequence[str]) -> Exception:
        if _FAILS in done:
            rank = self._ranks[done.index(_FAILS)]
            return PeerError(
                f"this rank can't go on, because rank {rank} failed in the forward pass: see its own error",
                rank=rank,
                cause="an error in the forward pass",
            )
        told = " and ".join(f"{does} on {self.ranks_with(does, done)}" for does in dict.fromkeys(done))
        last = f" after {self._last.removeprefix('calls ')}" if "`" in self._last else ""  # not after the whole
        return caused_by(
            self._error(f"{self._rule}, but the forward pass {told}{last}. {self._remedy}"), self.unlike_most(done)
        )
