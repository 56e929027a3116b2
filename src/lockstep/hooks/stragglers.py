"""Which rank is slower than the others, and at what.

Ranks that exchange gradients take equally long for a step, whichever of them is slow: the others wait for it. So each
rank's own work is compared: the step without that wait.
"""

from __future__ import annotations

import math
import socket
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from statistics import fmean
from typing import Literal, NamedTuple, TypeAlias

from torch import nn

from lockstep.logging import MessageHub
from lockstep.model import MMDistributedDataParallel

# Seconds: of the whole, waiting for data, computing, and in a communication hook.
_Iteration: TypeAlias = tuple[float, float, float, float]
Part: TypeAlias = Literal["data", "compute", "communication"]

# Iterations in one sample, or more where a record covers many; a sample counts if a rank is slow in most of them.
_SAMPLE = 5
_MOST_SAMPLES = 20
# A rank is slow after so many samples in a row, in which it has cost so much, and no longer slow after so many others.
_IN_A_ROW, _LOST_SECONDS, _RECOVERED_AFTER = 2, 0.5, 4
# Work that varies by itself, as with inputs of many lengths, makes now one rank slower, now another. Each sample of the
# last 40 in which that has cost much, but did not last, makes the row longer that is asked for.
_REMEMBERED, _MUCH_SECONDS, _LONGER = 40, _LOST_SECONDS / 2, 3
_LEAST_SECONDS = 0.003
# Another process on a rank's core makes it up to twice as slow while it lasts. What does not clearly cost more than
# that, as a share of the others' work, must last five times as long.
_CLEAR, _PATIENCE = 1.5, 5


class Sample(NamedTuple):
    """Some iterations of one rank; seconds per iteration.

    Attributes:
        end: the last of these iterations.
        iterations: how many there are.
        step: the median of whole iterations.
        data: that of the wait for data.
        compute: that of the step without data, waiting and communication; nan if the wait is not known.
        communication: that of the code of a communication hook.
        work: data and compute together, as much as all but a fifth of the iterations took at least.
        most: the same, as much as all but a fifth took at most.
        sending: as `work`, of communication.
    """

    end: int
    iterations: int
    step: float
    data: float
    compute: float
    communication: float
    work: float
    most: float
    sending: float


class OwnWork:
    """Measures this rank's own work.

    On the CPU, each iteration is measured by the wrapper's clock. Otherwise, the mean wait for gradients over some
    iterations is taken off their mean; see `ExchangeTimer`. Without DDP the wait is not known: then only the wait for
    data counts as own work.

    Args:
        model: the model, wrapped.

    **Cost**: 1 us per iteration.
    """

    def __init__(self, model: nn.Module) -> None:
        wrappers = [module for module in model.modules() if isinstance(module, MMDistributedDataParallel)]
        self._clocks = [wrapper.clock for wrapper in wrappers]
        self._is_exact = bool(wrappers) and all(wrapper.device_type == "cpu" for wrapper in wrappers)
        self._iterations: list[_Iteration] = []
        self._waited = self._hooked = 0.0
        self.host = socket.gethostname()

    def note(self, hub: MessageHub) -> None:
        """Add the iteration that ends."""
        scalars = hub.log_scalars
        if "train/time" not in scalars:  # without IterTimerHook
            return
        step, data = float(scalars["train/time"].values[-1]), float(scalars["train/data_time"].values[-1])
        waited = hooked = 0.0
        for clock in self._clocks:
            waited, hooked = waited + clock.waited, hooked + clock.hooked
        own = hooked - self._hooked
        self._iterations.append((step, data, max(0.0, step - data - own - (waited - self._waited)), own))
        self._waited, self._hooked = waited, hooked

    def take(self, end: int, waited: float | None) -> list[Sample]:
        """Return samples of the iterations up to `end` that have not been returned; a few may be left for later.

        Args:
            end: the number of complete iterations.
            waited: the mean wait for gradients, in seconds.
        """
        rows = self._iterations
        size = max(_SAMPLE, math.ceil(len(rows) / _MOST_SAMPLES)) if self._is_exact else max(1, len(rows))
        count = len(rows) // size
        begin = end - len(rows)
        groups = [rows[place * size : (place + 1) * size] for place in range(count)]
        self._iterations = rows[count * size :]
        return [self._sample(begin + (place + 1) * size, group, waited) for place, group in enumerate(groups)]

    def _sample(self, end: int, rows: Sequence[_Iteration], waited: float | None) -> Sample:
        count = len(rows)
        steps, data, compute, sending = (sorted(column) for column in zip(*rows, strict=True))
        if not self._is_exact:
            step, wait, own = fmean(steps), fmean(data), fmean(sending)
            rest = math.nan if waited is None else max(0.0, step - wait - waited - own)
            work = wait if waited is None else wait + rest
            return Sample(end, count, step, wait, rest, own, work, work, own)
        works = sorted(row[1] + row[2] for row in rows)
        half, few = count // 2, count // _SAMPLE
        return Sample(
            end, count, steps[half], data[half], compute[half], sending[half], works[few], works[-1 - few], sending[few]
        )


class Slow(NamedTuple):
    """A rank that is slow, or no longer slow.

    Attributes:
        rank: the rank.
        part: at what; None if it is no longer slow.
        begin: the first of the iterations of which the times are.
        end: the last of them.
        seconds: what that part of an iteration took on the rank.
        others: the median of the other ranks.
        lost: seconds of each iteration for which the others waited.
    """

    rank: int
    part: Part | None
    begin: int
    end: int
    seconds: float = 0.0
    others: float = 0.0
    lost: float = 0.0


class _Row:
    """Samples in a row in which one rank was slow at one thing."""

    def __init__(self, part: Part) -> None:
        self.part = part
        self.samples = 0
        self.lost = 0.0
        # The last ones: the sample, the others' time, what was lost, and the work without that.
        self._last: deque[tuple[Sample, float, float, float]] = deque(maxlen=_IN_A_ROW * _PATIENCE)

    @property
    def is_clear(self) -> bool:
        latest = list(self._last)[-_IN_A_ROW:]
        return sum(lost for _, _, lost, _ in latest) >= _CLEAR * sum(whole for *_, whole in latest)

    def add(self, sample: Sample, others: float, lost: float, whole: float) -> None:
        self.samples += 1
        self.lost += sample.iterations * lost
        self._last.append((sample, others, lost, whole))

    def described(self, rank: int, samples: int) -> Slow:
        """Return the means of the last samples."""
        latest = list(self._last)[-samples:]
        first, last = latest[0][0], latest[-1][0]
        seconds = fmean(getattr(sample, self.part) for sample, *_ in latest)
        others, lost = fmean(row[1] for row in latest), fmean(row[2] for row in latest)
        return Slow(rank, self.part, first.end - first.iterations + 1, last.end, seconds, others, lost)


class StragglerWatch:
    """Finds slow ranks in the samples of all ranks.

    A rank is slow if its own work takes `factor` times as long as the median of the others, and at least 3 ms longer,
    in two samples of five iterations in a row, in which it has cost half a second; if it takes less than 2.5 times as
    long, in ten samples, in which it has cost 2.5 seconds. Of the five iterations, all but one must take so long, and
    longer than all but one take the others.

    Args:
        factor: above 1.

    **Source**: medians instead of means, because one iteration with a pause says nothing of the others.
    """

    def __init__(self, factor: float) -> None:
        self._factor = factor
        self._rows: dict[int, _Row] = {}
        self._told: dict[int, Part] = {}
        self._good: dict[int, int] = {}  # samples since a rank that was slow has been slow
        self._unsteady: deque[int] = deque(maxlen=_REMEMBERED)

    @property
    def slow_ranks(self) -> Mapping[int, Part]:
        """The ranks that are slow, and at what."""
        return self._told

    def add(self, samples: Sequence[Sample]) -> list[Slow]:
        """Add one sample of each rank, of the same iterations; return what has changed."""
        found = self._found(samples)
        broken = 0
        changes: list[Slow] = []
        for rank in sorted({*found, *self._rows, *self._told}):
            sample, row, this = samples[rank], self._rows.pop(rank, None), found.get(rank)
            if row is not None and (this is None or this[0] != row.part):
                if rank not in self._told and row.lost >= _MUCH_SECONDS:
                    broken += row.samples
                row = None
            if this is not None:
                part, *times = this
                row = row or _Row(part)
                row.add(sample, *times)
                self._rows[rank] = row
            changes += self._changes(rank, row, sample.end)
        self._unsteady.append(broken)
        return changes

    def _changes(self, rank: int, row: _Row | None, end: int) -> list[Slow]:
        if row is None:
            if rank in self._told:
                self._good[rank] = self._good.get(rank, 0) + 1
                if self._good[rank] >= _RECOVERED_AFTER:
                    del self._told[rank], self._good[rank]
                    return [Slow(rank, None, end, end)]
            return []
        self._good.pop(rank, None)
        patience = 1 if row.is_clear else _PATIENCE
        least = _IN_A_ROW * patience + _LONGER * sum(self._unsteady)
        is_long = row.samples >= least and row.lost >= _LOST_SECONDS * patience
        if not is_long or self._told.get(rank) == row.part:
            return []
        self._told[rank] = row.part
        return [row.described(rank, _IN_A_ROW * patience)]

    def _found(self, samples: Sequence[Sample]) -> dict[int, tuple[Part, float, float, float]]:
        """Return the ranks that were slow: at what, and seconds.

        They are the others' median of it, what was lost in each iteration, and what the work takes without that.
        """
        is_known = not any(math.isnan(sample.compute) for sample in samples)
        work = _Others(samples, lambda sample: sample.data + (sample.compute if is_known else 0.0))
        data, most = _Others(samples, lambda sample: sample.data), _Others(samples, lambda sample: sample.most)
        compute = _Others(samples, lambda sample: sample.compute)
        sending = _Others(samples, lambda sample: sample.communication)
        found: dict[int, tuple[Part, float, float, float]] = {}
        for rank, sample in enumerate(samples):
            if not self._is_much(sample.work - work.least, work.least):  # which is quicker to see
                continue
            usual = work.median(rank)
            lost = sample.work - usual
            # Without the others' own work, it is compared with what a step would take without the delay.
            whole = usual if is_known else max(usual, sample.step - lost)
            if self._is_much(lost, whole) and sample.work > most.median(rank):
                if is_known and compute.excess(rank) > data.excess(rank):
                    found[rank] = "compute", compute.median(rank), lost, whole
                else:
                    found[rank] = "data", data.median(rank), lost, whole
        if found:  # a communication hook may wait for the slow rank
            return found
        for rank, sample in enumerate(samples):
            if not self._is_much(sample.sending - sending.least, sending.least):
                continue
            usual = sending.median(rank)
            lost = sample.sending - usual
            whole = usual + work.median(rank) if is_known else sample.step - lost
            if self._is_much(lost, whole):
                found[rank] = "communication", usual, lost, whole
        return found

    def _is_much(self, lost: float, usual: float) -> bool:
        return lost >= max(_LEAST_SECONDS, (self._factor - 1) * usual)


class _Others:
    """A value of each rank, and the median of all ranks but one."""

    def __init__(self, samples: Sequence[Sample], value: Callable[[Sample], float]) -> None:
        self._samples, self._value = samples, value

    @cached_property
    def _sorted(self) -> list[float]:
        return sorted(map(self._value, self._samples))

    @cached_property
    def least(self) -> float:
        """A number that none of the medians is below."""
        return self._sorted[max(0, len(self._sorted) - 2) // 2]

    def median(self, rank: int) -> float:
        """Return the median of the other ranks."""
        own, count = bisect_left(self._sorted, self._value(self._samples[rank])), len(self._sorted) - 1
        low, high = (place + (place >= own) for place in ((count - 1) // 2, count // 2))
        return (self._sorted[low] + self._sorted[high]) / 2

    def excess(self, rank: int) -> float:
        """Return how much a rank's value is above that."""
        return self._value(self._samples[rank]) - self.median(rank)


_SAID: Mapping[Part, str] = {
    "data": "it waits {} for each batch",
    "compute": "its forward and backward passes take {}",
    "communication": "its communication hook takes {}",
}


def described(slow: Slow, size: int, host: str = "") -> str:
    """Return what is slow in words.

    Example:
        >>> described(Slow(2, "compute", 41, 60, 0.095, 0.015, 0.08), 4)[:75]
        'rank 2 of 4 is slow: its forward and backward passes take 95 ms, the median'
        >>> described(Slow(1, None, 100, 100), 2, "node7")
        'rank 1 of 2 (on node7) is no longer slow, after iteration 100'
    """
    rank = f"rank {slow.rank} of {size}" + (f" (on {host})" if host else "")
    if slow.part is None:
        return f"{rank} is no longer slow, after iteration {slow.end}"
    others = f"rank {1 - slow.rank}" if size == 2 else "the median of the others is"
    return (
        f"{rank} is slow: {_SAID[slow.part].format(_shown(slow.seconds))}, {others} {_shown(slow.others)} "
        f"(iterations {slow.begin} to {slow.end}). All ranks wait for it, {_shown(slow.lost)} in each step"
    )


def _shown(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"
