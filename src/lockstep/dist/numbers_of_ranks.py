"""Numbers that every rank has, brought to rank 0 while all of them go on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import timedelta

import torch
from torch.distributed import Work

from lockstep.dist.groups import GroupLike, resolve
from lockstep.dist.handles import wait_for
from lockstep.dist.objects import gather_object

_TAG = 0x10C6  # sends and receives between two ranks match by tag, in order
_MOST = 64  # numbers in a row; more of them travel with their names


class NumbersOfRanks:
    """Gathers a dict of numbers from each rank in two moments: `send`, and later `receive`.

    On the CPU nobody waits between them: a rank that is a little late, as every rank is now and then, holds up no
    other. On an accelerator all is done in `receive`, which is best called at once.

    Rank 0 remembers the names of each rank, so that numbers alone travel, in memory that stays. Where a rank has other
    names than the last time, they come along.

    **Collective**: every rank calls both, in turn.

    **Cost**: on the CPU one message of 520 bytes from each rank to rank 0; else a `gather_object`.

    **Example (2 ranks)**::

        >>> from lockstep.dist import get_rank
        >>> numbers = NumbersOfRanks()
        >>> numbers.send({"time": 0.5 + get_rank()})
        >>> received = numbers.receive()
        >>> received == ([{"time": 0.5}, {"time": 1.5}] if get_rank() == 0 else None)
        True
    """

    def __init__(self, group: GroupLike = None) -> None:
        self._here = resolve(group)
        self.travels_beside = self._here.size > 1 and self._here.in_pairs
        self._numbers: Mapping[str, float] = {}
        self._works: list[Work] = []
        # A row is: how many bytes of names and numbers follow, usually 0; the numbers.
        count = self._here.size if self._here.rank == 0 else 1
        self._rows = [torch.zeros(1 + _MOST, dtype=torch.double) for _ in range(count)]
        self._names: list[tuple[str, ...]] = [()] * count
        self._text = torch.empty(0, dtype=torch.uint8)

    def send(self, numbers: Mapping[str, float]) -> None:
        """Send this rank's numbers, and go on at once."""
        self._numbers = numbers
        if not self.travels_beside:
            return
        pg = self._here.pg
        assert pg is not None
        if self._here.rank == 0:
            self._works = [pg.recv([row], rank, _TAG) for rank, row in enumerate(self._rows) if rank]
            return
        row, names = self._rows[0], tuple(numbers)
        if names == self._names[0] and len(names) <= _MOST:
            row[0] = 0
            row[1 : 1 + len(names)] = torch.tensor(list(numbers.values()), dtype=torch.double)
            self._works = [pg.send([row], 0, _TAG)]
            return
        self._names[0] = names
        self._text = torch.frombuffer(bytearray(json.dumps(dict(numbers)).encode()), dtype=torch.uint8)
        row[0] = len(self._text)
        self._works = [pg.send([row], 0, _TAG), pg.send([self._text], 0, _TAG)]

    def receive(self, timeout: timedelta | None = None) -> list[Mapping[str, float]] | None:
        """Return what was sent, in the order of ranks; None on all ranks but 0.

        Raises:
            PeerError: a rank has gone.
            CollectiveTimeoutError: a rank has not sent anything in time.
        """
        if not self.travels_beside:
            return gather_object(self._numbers, group=self._here.pg)
        for work in self._works:
            wait_for(work, self._here, timeout)
        self._works = []
        if self._here.rank != 0:
            return None
        return [self._numbers, *(self._read(rank) for rank in range(1, self._here.size))]

    def _read(self, rank: int) -> Mapping[str, float]:
        size, *values = self._rows[rank].tolist()
        if not size:
            return dict(zip(self._names[rank], values, strict=False))
        pg = self._here.pg
        assert pg is not None
        text = torch.empty(int(size), dtype=torch.uint8)
        wait_for(pg.recv([text], rank, _TAG), self._here)
        numbers: dict[str, float] = json.loads(text.numpy().tobytes())
        self._names[rank] = tuple(numbers)
        return numbers
