"""Whether all ranks call the same parts of a model in the same order, where each call is a collective."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from lockstep.dist import all_gather, get_world_size
from lockstep.dist.consistency import check_mode
from lockstep.errors import PeerError

# Of the passes of each kind, those that are compared after the first ones.
_EVERY = 50
_END, _FAILED = -1, -2


class CallOrder:
    """Compares over ranks which units of a model a forward pass calls.

    FSDP, and ZeRO at stage 3, gather the parameters of a unit by collectives that carry no names: ranks that call
    different units get a mixture of both, or wait for each other forever. In a forward pass that is compared, each call
    of a unit and the end are preceded by one and the same small collective, so that ranks which part ways meet there.

    The first passes of each kind are compared, and every fiftieth; all of them after `check_collectives("always")`.

    Args:
        names: of the units, the same on all ranks; empty for the whole model.
        rule: what all ranks must do, the beginning of an error.
        remedy: returns what to do, the end of an error, from the names of the units in question.
        error: the class of an error.
        first: how many passes of each kind are compared before only every fiftieth is.
        mesh: the ranks, along one axis or several; by default all.

    Attributes:
        groups: those over which something goes from every rank to every rank, one after the other.
        has_peers: whether there are several ranks.
        is_compared: whether the present pass is.

    **Cost**: of a pass that is compared, four bytes from every rank to every rank for each call.
    """

    def __init__(
        self,
        names: Sequence[str],
        *,
        rule: str,
        remedy: Callable[[Sequence[str]], str],
        error: type[Exception],
        first: int,
        mesh: DeviceMesh | None = None,
    ) -> None:
        # From the axis whose neighbours come first, so that what is gathered is in the order of the mesh.
        axes = [] if mesh is None else [axis for axis in reversed(range(mesh.ndim)) if mesh.size(axis) > 1]
        self.groups = [None] if mesh is None else [mesh.get_group(axis) for axis in axes]
        self._ranks: Sequence[int] = range(get_world_size()) if mesh is None else mesh.mesh.flatten().tolist()
        self._names, self._rule, self._remedy, self._error, self._first = names, rule, remedy, error, first
        self._counts: Counter[str] = Counter()
        self._last = ""
        self.has_peers = len(self._ranks) > 1
        self.is_compared = False

    @contextmanager
    def compared(self) -> Iterator[None]:
        """Run a forward pass inside, compared if it is time to.

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
        self.is_compared = self.is_due(kind)
        self._last = ""

    def call(self, index: int) -> None:
        """Meet the other ranks before a unit is called.

        Raises:
            Exception: on every rank, if other ranks call other units or end.
            PeerError: if another rank has failed in the pass.
        """
        self._meet(index)
        self._last = self._names[index]

    def end(self, *, failed: bool) -> None:
        """Meet the other ranks at the end of a pass; raises as `call` does."""
        self._meet(_FAILED if failed else _END)

    def is_due(self, kind: str) -> bool:
        """Count a pass of a kind, and return whether it is to be compared."""
        number = self._counts[kind]
        self._counts[kind] += 1
        return self.has_peers and (number < self._first or number % _EVERY == 0 or check_mode() == "always")

    def from_all(self, row: Tensor) -> Tensor:
        """Return every rank's row, in the order of the mesh. **Collective**: every rank."""
        table = row.unsqueeze(0)
        for group in self.groups:
            table = torch.cat(all_gather(table, group))
        return table

    def ranks_with(self, value: object, values: Sequence[object]) -> str:
        """Return which ranks have a value, in words."""
        ranks = [str(rank) for rank, other in zip(self._ranks, values, strict=True) if other == value]
        return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(ranks)}"

    def _meet(self, event: int) -> None:
        if not self.is_compared:
            return
        events: list[int] = self.from_all(torch.tensor([event], dtype=torch.int32)).flatten().tolist()
        if all(other == event for other in events) and event != _FAILED:
            return
        self.is_compared = False
        if event == _FAILED:  # with an error of its own, which is on its way already
            return
        if _FAILED in events:
            rank = self._ranks[events.index(_FAILED)]
            raise PeerError(
                f"this rank can't go on, because rank {rank} failed in the forward pass: see its own error",
                rank=rank,
                cause="an error in the forward pass",
            )
        does = " and ".join(
            f"{self._told(other)} on {self.ranks_with(other, events)}" for other in dict.fromkeys(events)
        )
        last = f" after `{self._last}`" if self._last else ""
        units = [self._names[other] for other in dict.fromkeys(events) if other >= 0]
        raise self._error(f"{self._rule}, but the forward pass {does}{last}. {self._remedy(units)}")

    def _told(self, event: int) -> str:
        if event == _END:
            return "ends"
        return f"calls `{self._names[event]}`" if self._names[event] else "calls the whole"
