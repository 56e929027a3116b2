"""Interleaved timing: every contender once a round, in turning order, so that a noisy moment hits all alike."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import Literal, TypeAlias

import torch.distributed as torch_dist

from lockstep import dist

Contender: TypeAlias = Callable[[], object]
CheckMode: TypeAlias = Literal["off", "sample", "always"]


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
        """Median against median, which the goals are for."""
        return self.median_seconds / self.baseline_median_seconds

    @property
    def best_ratio(self) -> float:
        """Best against best: what the code costs where the machine does not disturb."""
        return self.best_seconds / self.baseline_best_seconds

    def as_dict(self) -> dict[str, object]:
        return {**asdict(self), "ratio": self.ratio, "best_ratio": self.best_ratio}


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
    spent = interleaved({"ours": ours, "theirs": theirs}, rounds, calls)
    peaks = [_peak_bytes(contender) if memory else None for contender in (ours, theirs)]
    return _row(group, case, baseline, spent["ours"], spent["theirs"], goal, *peaks)


def compare_modes(
    group: str,
    case: str,
    *,
    ours: Contender,
    theirs: Contender,
    baseline: str,
    rounds: int,
    calls: int = 1,
    goals: Mapping[CheckMode, str],
) -> Iterator[Row]:
    """Time a call under some modes of `check_collectives` and a baseline, all in every round. **Collective**.

    Args:
        group: the group of rows.
        case: what is called.
        ours: the call.
        theirs: the baseline.
        baseline: what it is.
        rounds: number of rounds.
        calls: number of calls in a round.
        goals: the modes, and the goal under each.
    """
    modes = {mode: partial(dist.check_collectives, mode) for mode in goals}
    spent = interleaved({**dict.fromkeys(goals, ours), baseline: theirs}, rounds, calls, before=modes)
    dist.check_collectives("off")
    for mode, goal in goals.items():
        yield _row(group, f"{case}, checks {mode}", baseline, spent[mode], spent[baseline], goal)


def interleaved(
    contenders: Mapping[str, Contender],
    rounds: int,
    calls: int = 1,
    *,
    before: Mapping[str, Contender] = MappingProxyType({}),
    settle: Contender = lambda: None,
) -> dict[str, list[float]]:
    """Time contenders, all in every round, in turning order; return the seconds per call of the slowest rank.

    Args:
        contenders: what is called, by name.
        rounds: number of rounds.
        calls: number of calls in a round.
        before: what is called before a round of a contender, and is not timed.
        settle: what is called after it, and is not timed, either.

    **Collective**.
    """
    names = list(contenders)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(-2, limited(rounds)):  # the first two warm up
        for place in range(len(names)):
            name = names[(number + place) % len(names)]
            before.get(name, lambda: None)()
            torch_dist.barrier()
            settle()
            start = time.perf_counter()
            for _ in range(calls):
                contenders[name]()
            spent = time.perf_counter() - start
            settle()
            if number >= 0:
                seconds[name].append(spent / calls)
    return {name: slowest(times) for name, times in seconds.items()}


_most_rounds = sys.maxsize


def limit_rounds(most: int) -> None:
    """Let no comparison take more rounds: to try the code, not to measure."""
    global _most_rounds
    _most_rounds = most


def limited(rounds: int) -> int:
    return min(rounds, _most_rounds)


def _row(
    group: str,
    case: str,
    baseline: str,
    ours: list[float],
    theirs: list[float],
    goal: str,
    peak_bytes: int | None = None,
    baseline_peak_bytes: int | None = None,
) -> Row:
    return Row(
        group, case, baseline, min(ours), median(ours), min(theirs), median(theirs), goal, peak_bytes,
        baseline_peak_bytes,
    )  # fmt: skip


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
