"""Which rank is slower than the others, and at what.

Ranks that exchange gradients take equally long for a step, whichever of them is slow: the others wait for it. So each
rank's own work is compared: the step without that wait. On an accelerator both are measured by events in the order of
what the device does. The host runs ahead of it, so its own clock would not show when the device waits.
"""

from __future__ import annotations

import math
import socket
from bisect import bisect_left
from collections import deque
from collections.abc import Mapping, Sequence
from statistics import fmean
from time import perf_counter
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lockstep.device import Moment, has_passed, moment, seconds_between
from lockstep.logging import MessageHub
from lockstep.model import MMDistributedDataParallel
from lockstep.model.autograd_graph import on_backward
from lockstep.model.ddp import ExchangeClock

Part: TypeAlias = Literal["data", "compute"]

# Iterations in one sample; more if a record would have more than `_MOST_SAMPLES`.
_SAMPLE = 5
_MOST_SAMPLES = 20
# A rank counts as slow after `_IN_A_ROW` samples, if these have cost the others `_LOST_SECONDS` at least. It has
# recovered after `_RECOVERED_AFTER` samples in which it was not slow.
_IN_A_ROW, _LOST_SECONDS, _RECOVERED_AFTER = 2, 0.5, 4
# Work that varies by itself, as with inputs of many lengths, makes now one rank slower, now another. A row of slow
# samples that has cost `_MUCH_SECONDS`, but ends before it is reported, shows that. For each sample of such rows, among
# the last `_REMEMBERED` comparisons, a row must be `_LONGER` samples longer.
_REMEMBERED, _MUCH_SECONDS, _LONGER = 40, _LOST_SECONDS / 2, 3
_LEAST_SECONDS = 0.003  # a smaller delay of an iteration is never slow
# Another process on a rank's core makes it up to twice as slow while it runs. A delay of less than `_CLEAR` times the
# others' work must therefore last `_PATIENCE` times as long.
_CLEAR, _PATIENCE = 1.5, 5


class _Iteration(NamedTuple):
    """The moments of one iteration, which an accelerator may not have reached yet, and seconds measured by the host."""

    number: int
    begin: Moment
    end: Moment
    waits: list[tuple[Moment, Moment]]
    data: float
    communication: float  # the code of a communication hook, which may wait for others
    host: float
    is_host_bound: bool


# Of one iteration, when all its moments have passed: its number, and the seconds of its step, data, compute, own work
# and host; compute is NaN if the wait for others is not known. Last, whether it is host-bound.
_Times: TypeAlias = tuple[int, float, float, float, float, float, bool]


class Sample(NamedTuple):
    """Some iterations of one rank; seconds per iteration.

    Attributes:
        end: the last of these iterations.
        iterations: how many there are.
        step: the median of whole iterations.
        data: the median of the waits for data.
        compute: the median of the step without data, waiting and communication; nan if the wait is not known.
        low_work: data and compute together; a low quantile: four fifths of the iterations took as long.
        high_work: the same; a high quantile: four fifths of the iterations took at most so long.
        host: the iteration by the host's clock, which also runs while the host waits for its accelerator; the low
            quantile. 0 on the CPU.
        is_host_bound: whether the accelerator had nothing to do until the host gave it work, in most iterations.
    """

    end: int
    iterations: int
    step: float
    data: float
    compute: float
    low_work: float
    high_work: float
    host: float = 0.0
    is_host_bound: bool = False


class OwnWork:
    """Measures this rank's own work.

    Under DDP it is each iteration without the wait for the gradients of others, see `ExchangeClock`. Otherwise that
    wait is not known, and only the wait for data counts as own work.

    Args:
        model: the model, wrapped.
        interval: iterations from one record to the next.

    **Cost**: 5 us per iteration; on an accelerator, one event on its current stream besides those of the clock.
    """

    def __init__(self, model: nn.Module, interval: int) -> None:
        wrappers = [module for module in model.modules() if isinstance(module, DistributedDataParallel)]
        self._clocks = [_clock_of(wrapper) for wrapper in wrappers]
        for clock in self._clocks:
            clock.start()
        # Without a wrapper there is no wait of the device to compare an iteration with.
        self._device = next(wrappers[0].parameters()).device if wrappers else torch.device("cpu")
        self._size = max(_SAMPLE, math.ceil(interval / _MOST_SAMPLES))
        self._hooked = sum(clock.hooked for clock in self._clocks)
        self._last: Moment | None = None
        self._last_on_host = 0.0
        self._uncompleted: deque[_Iteration] = deque()
        self._completed: list[_Times] = []
        self.host = socket.gethostname()

    def begin(self) -> None:
        """Begin to measure the next iteration."""
        self._last, self._last_on_host = moment(self._device), perf_counter()

    def note(self, number: int, hub: MessageHub) -> None:
        """Add the iteration that ends, by its number. It does nothing without `IterTimerHook`."""
        scalars = hub.log_scalars
        waits = [wait for clock in self._clocks for wait in clock.take()]
        if self._last is None or "train/data_time" not in scalars:
            return
        data = float(scalars["train/data_time"].values[-1])
        hooked = sum(clock.hooked for clock in self._clocks)  # seconds in communication hooks so far
        is_on_cpu, has_caught_up = self._device.type == "cpu", has_passed(self._last)
        now, on_host = moment(self._device), perf_counter()
        host = 0.0 if is_on_cpu else on_host - self._last_on_host
        is_host_bound = has_caught_up and not is_on_cpu
        self._uncompleted.append(
            _Iteration(number, self._last, now, waits, data, hooked - self._hooked, host, is_host_bound)
        )
        self._last, self._last_on_host, self._hooked = now, on_host, hooked

    def take(self) -> tuple[float | None, list[Sample]]:
        """Return the mean wait for gradients, and samples, of the iterations that have not been returned.

        Those that an accelerator has not completed, and a few others, are left for later. The mean is None if the wait
        is not known.
        """
        waited = []
        while self._uncompleted and has_passed(self._uncompleted[0].end):
            each = self._uncompleted.popleft()
            wait = sum(seconds_between(*wait) for wait in each.waits) if self._clocks else math.nan
            step = seconds_between(each.begin, each.end)
            compute = max(step - each.data - wait - each.communication, 0.0)  # `max` returns NaN, its first argument
            work = each.data + (0.0 if math.isnan(compute) else compute)
            self._completed.append((each.number, step, each.data, compute, work, each.host, each.is_host_bound))
            waited.append(wait)
        samples = []
        while len(self._completed) >= self._size:
            samples.append(_sample(self._completed[: self._size]))
            del self._completed[: self._size]
        mean = fmean(waited) if waited else math.nan
        return None if math.isnan(mean) else mean, samples

    def close(self) -> None:
        """Stop measuring."""
        for clock in self._clocks:
            clock.stop()


def _clock_of(wrapper: DistributedDataParallel) -> ExchangeClock:
    """Return the clock of a wrapper's waits; torch's DDP, which has none, gets one here."""
    if isinstance(wrapper, MMDistributedDataParallel):
        return wrapper.clock
    clock = ExchangeClock()
    on_backward(wrapper, clock.follow)
    return clock


def _sample(rows: Sequence[_Times]) -> Sample:
    count = len(rows)
    half, few = count // 2, count // _SAMPLE
    numbers, steps, data, compute, works, host, is_bound = map(sorted, zip(*rows, strict=True))
    median_compute = math.nan if any(map(math.isnan, compute)) else compute[half]
    return Sample(
        numbers[-1], count, steps[half], data[half], median_compute, works[few], works[-1 - few], host[few],
        is_bound[half],
    )  # fmt: skip


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


class _Delay(NamedTuple):
    """What makes a rank slow in one sample; seconds per iteration.

    Attributes:
        part: at what it is slow.
        others: the median of the other ranks for that part.
        lost: how much longer it takes than they.
        remaining: what it would take without the delay.
    """

    part: Part
    others: float
    lost: float
    remaining: float


class _Streak:
    """Samples in a row in which one rank was slow at one thing."""

    def __init__(self, part: Part) -> None:
        self.part = part
        self.samples = 0
        self.lost = 0.0
        self._last: deque[tuple[Sample, _Delay]] = deque(maxlen=_IN_A_ROW * _PATIENCE)

    @property
    def is_clear(self) -> bool:
        latest = [delay for _, delay in self._last][-_IN_A_ROW:]
        return sum(delay.lost for delay in latest) >= _CLEAR * sum(delay.remaining for delay in latest)

    def add(self, sample: Sample, delay: _Delay) -> None:
        self.samples += 1
        self.lost += sample.iterations * delay.lost
        self._last.append((sample, delay))

    def described(self, rank: int, samples: int) -> Slow:
        """Return the means of the last samples."""
        measured, delays = zip(*list(self._last)[-samples:], strict=True)
        seconds = fmean(getattr(sample, self.part) for sample in measured)
        others, lost = fmean(delay.others for delay in delays), fmean(delay.lost for delay in delays)
        begin = measured[0].end - measured[0].iterations + 1
        return Slow(rank, self.part, begin, measured[-1].end, seconds, others, lost)


class StragglerWatch:
    """Finds slow ranks in the samples of all ranks.

    A rank is slow if its own work takes `factor` times as long as the median of the others, and at least 3 ms longer,
    in two samples of five iterations in a row, in which it has cost half a second; if it takes less than 2.5 times as
    long, in ten samples, in which it has cost 2.5 seconds. Four of the five iterations must take so long, and longer
    than four of the five iterations of the other ranks.

    Args:
        factor: above 1.

    Medians are compared, not means, because one iteration with a pause says nothing of the others.
    """

    def __init__(self, factor: float) -> None:
        self._factor = factor
        self._streaks: dict[int, _Streak] = {}
        self._pending: list[deque[Sample]] = []  # of each rank, those that others have yet to send
        self._slow: dict[int, Part] = {}
        self._samples_since_slow: dict[int, int] = {}  # samples since a rank that was slow has been slow
        self._broken_samples: deque[int] = deque(maxlen=_REMEMBERED)

    @property
    def slow_ranks(self) -> Mapping[int, Part]:
        """The ranks that are slow, and at what."""
        return self._slow

    def add(self, by_rank: Sequence[Sequence[Sample]]) -> list[Slow]:
        """Add the samples that each rank has sent; return what has changed."""
        self._pending = self._pending or [deque() for _ in by_rank]
        for pending, samples in zip(self._pending, by_rank, strict=True):
            pending.extend(samples)
        changes: list[Slow] = []
        while all(self._pending):
            changes += self._compare([pending.popleft() for pending in self._pending])
        return changes

    def _compare(self, samples: Sequence[Sample]) -> list[Slow]:
        """Compare one sample of each rank, of the same iterations; return what has changed."""
        found = self._find_slow(samples)
        broken = 0
        changes: list[Slow] = []
        for rank in sorted({*found, *self._streaks, *self._slow}):
            sample, streak, delay = samples[rank], self._streaks.pop(rank, None), found.get(rank)
            if streak is not None and (delay is None or delay.part != streak.part):
                if rank not in self._slow and streak.lost >= _MUCH_SECONDS:
                    broken += streak.samples
                streak = None
            if delay is not None:
                streak = streak or _Streak(delay.part)
                streak.add(sample, delay)
                self._streaks[rank] = streak
            changes += self._update(rank, streak, sample.end)
        self._broken_samples.append(broken)
        return changes

    def _update(self, rank: int, streak: _Streak | None, end: int) -> list[Slow]:
        if streak is None:
            if rank in self._slow:
                self._samples_since_slow[rank] = self._samples_since_slow.get(rank, 0) + 1
                if self._samples_since_slow[rank] >= _RECOVERED_AFTER:
                    del self._slow[rank], self._samples_since_slow[rank]
                    return [Slow(rank, None, end, end)]
            return []
        self._samples_since_slow.pop(rank, None)
        patience = 1 if streak.is_clear else _PATIENCE
        least = _IN_A_ROW * patience + _LONGER * sum(self._broken_samples)
        is_long = streak.samples >= least and streak.lost >= _LOST_SECONDS * patience
        if not is_long or self._slow.get(rank) == streak.part:
            return []
        self._slow[rank] = streak.part
        return [streak.described(rank, _IN_A_ROW * patience)]

    def _find_slow(self, samples: Sequence[Sample]) -> dict[int, _Delay]:
        """Return the ranks that were slow in a sample, and what made them so."""
        is_known = not any(math.isnan(sample.compute) for sample in samples)
        works = [sample.data + (sample.compute if is_known else 0.0) for sample in samples]
        usual, longest = _medians_of_others(works), _medians_of_others([sample.high_work for sample in samples])
        waits = _medians_of_others([each.data for each in samples])
        computes = _medians_of_others([each.compute for each in samples])
        with_host = _medians_of_others([max(work, each.host) for work, each in zip(works, samples, strict=True)])
        found: dict[int, _Delay] = {}
        for rank, sample in enumerate(samples):
            others, data, compute = usual[rank], waits[rank], computes[rank]
            is_doubtful = sample.is_host_bound and self._is_much(sample.low_work - others, others)
            # A host that is ahead of its device need not be faster: it may have begun earlier. Only the wait for data
            # shows the difference.
            if is_doubtful and not self._is_much(sample.data - data, data):
                others = with_host[rank]
            lost = sample.low_work - others
            # Without the others' own work, it is compared with what a step would take without the delay.
            remaining = others if is_known else max(others, sample.step - lost)
            if self._is_much(lost, remaining) and sample.low_work > longest[rank]:
                is_data = not is_known or sample.data - data >= sample.compute - compute
                one = _Delay("data", data, lost, remaining) if is_data else _Delay("compute", compute, lost, remaining)
                found[rank] = one
        return found

    def _is_much(self, lost: float, usual: float) -> bool:
        return lost >= max(_LEAST_SECONDS, (self._factor - 1) * usual)


def _medians_of_others(values: Sequence[float]) -> list[float]:
    """Return for each rank the median of the values of all others."""
    ordered, others = sorted(values), len(values) - 1
    places = [bisect_left(ordered, value) for value in values]
    return [
        sum(ordered[middle + (middle >= place)] for middle in ((others - 1) // 2, others // 2)) / 2 for place in places
    ]


_DESCRIPTIONS: Mapping[Part, str] = {
    "data": "it waits {} for each batch",
    "compute": "its forward and backward passes take {}",
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
        f"{rank} is slow: {_DESCRIPTIONS[slow.part].format(_shown(slow.seconds))}, {others} {_shown(slow.others)} "
        f"(iterations {slow.begin} to {slow.end}). All ranks wait for it, {_shown(slow.lost)} in each step"
    )


def _shown(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"
