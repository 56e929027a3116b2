"""The times of each rank, in a separate file next to the records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from lockstep.logging import JsonLinesSink

COLUMNS = ("time", "data_time", "comm_time", "memory_mib")
_RANKS_PER_RECORD = 64
_DIGITS = 4


class RankTimes:
    """Writes `ranks.jsonl`: each line covers some iterations, with one number per rank in each column.

    `time` is the mean of whole iterations, `data_time` the part of it spent waiting for data, `comm_time` the part
    spent waiting for the exchange of gradients, `memory_mib` the peak memory so far. Rank 0 writes the numbers that it
    receives for its records anyway, so nothing more is sent, and no shared disk is needed.

    Args:
        path: the file.

    **Units**: seconds, to 4 digits; MiB.

    **Cost**: about 30 bytes per rank and record; with more than 64 ranks several records share a line.
    """

    def __init__(self, path: Path) -> None:
        self._sink = JsonLinesSink(path)
        self._records = 0
        self._iteration = 0
        self._count = 0
        self._sums: dict[str, list[float]] = {}

    def add(self, iteration: int, count: int, ranks: Sequence[Mapping[str, float]], *, flush: bool = True) -> None:
        """Add the means of the `count` iterations up to `iteration`, by rank."""
        self._records += 1
        self._iteration = iteration
        self._count += count
        for name in COLUMNS:
            if all(name in numbers for numbers in ranks):
                sums = self._sums.setdefault(name, [0.0] * len(ranks))
                for rank, numbers in enumerate(ranks):
                    sums[rank] += numbers[name] * count
        if self._records * _RANKS_PER_RECORD >= len(ranks):
            self._write(flush)

    def close(self) -> None:
        """Write what is left, and close the file."""
        if self._count:
            self._write()
        self._sink.close()

    def _write(self, flush: bool = True) -> None:
        columns = {name: [_rounded(value / self._count) for value in sums] for name, sums in self._sums.items()}
        self._sink.write({"iter": self._iteration, "count": self._count, **columns}, flush=flush)
        self._records, self._count, self._sums = 0, 0, {}


def _rounded(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")
