"""Interleaved timing: every contender once a round, in turning order, so that a noisy moment hits all alike."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch.distributed as torch_dist

Contender = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Row:
    """One comparison. Times are seconds per call, of the slowest rank; memory is the peak above that before."""

    group: str
    case: str
    baseline: str
    best_seconds: float
    median_seconds: float
    baseline_best_seconds: float
    baseline_median_seconds: float
    goal: str = ""
    peak_bytes: int | None = None
    baseline_peak_bytes: int | None = None

    @property
    def ratio(self) -> float:
        """Best against best: what the code costs where the machine does not disturb."""
        return self.best_seconds / self.baseline_best_seconds

    @property
    def median_ratio(self) -> float:
        return self.median_seconds / self.baseline_median_seconds

    def as_dict(self) -> dict[str, object]:
        return {**asdict(self), "ratio": self.ratio, "median_ratio": self.median_ratio}


def compare(
    group: str,
    case: str,
    *,
    ours: Contender,
    theirs: Contender,
    baseline: str,
    rounds: int,
    calls: int = 1,
    goal: str = "",
    memory: bool = False,
) -> Row:
    """Time two contenders on all ranks. **Collective**."""
    contenders = [ours, theirs]
    seconds: list[list[float]] = [[], []]
    for contender in contenders:
        contender()
    for number in range(rounds):
        for which in (0, 1) if number % 2 else (1, 0):
            torch_dist.barrier()
            start = time.perf_counter()
            for _ in range(calls):
                contenders[which]()
            seconds[which].append((time.perf_counter() - start) / calls)
    spent = [slowest(times) for times in seconds]
    peaks = [_peak_bytes(contender) if memory else None for contender in contenders]
    return Row(
        group,
        case,
        baseline,
        min(spent[0]),
        median(spent[0]),
        min(spent[1]),
        median(spent[1]),
        goal,
        *peaks,
    )


def slowest(times: list[float]) -> list[float]:
    """Return, round by round, the time of the rank that took longest."""
    everyone: list[list[float]] = [[] for _ in range(torch_dist.get_world_size())]
    torch_dist.all_gather_object(everyone, times)
    return [max(same_round) for same_round in zip(*everyone, strict=True)]


def _peak_bytes(contender: Contender) -> int | None:
    """Return the peak of resident memory during one call, above that before; None where the system doesn't tell."""
    reset = Path("/proc/self/clear_refs")
    if not reset.exists():
        return None
    torch_dist.barrier()
    reset.write_text("5")  # resets the high-water mark, see proc(5)
    before = _status_bytes("VmRSS")
    kept = contender()
    peak = _status_bytes("VmHWM") - before
    del kept
    peaks: list[int] = [0] * torch_dist.get_world_size()
    torch_dist.all_gather_object(peaks, peak)
    return max(peaks)


def _status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(field)
