"""Samples of ranks that are healthy, slow, uneven or paused, and what is said of them."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from statistics import median
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lockstep.diagnostics.slow_ranks import OwnWork, Sample, Slow, StragglerWatch, described
from lockstep.dist import get_rank
from lockstep.errors import ConfigError
from lockstep.hooks import LoggerHook
from lockstep.logging import MessageHub
from lockstep.model import MMDistributedDataParallel, MMSeparateDistributedDataParallel
from lockstep.testing import ranks


def sample(place: int, data: Sequence[float], compute: Sequence[float], known: bool = True) -> Sample:
    """Return the sample of five iterations, the `place`-th of a run."""
    work = sorted(wait + (own if known else 0.0) for wait, own in zip(data, compute, strict=True))
    step = median(data) + median(compute)
    own = median(compute) if known else math.nan
    return Sample(5 * place + 5, 5, step, median(data), own, work[1], work[-2])


def even(place: int, data: float = 0.001, compute: float = 0.015, known: bool = True) -> Sample:
    return sample(place, [data] * 5, [compute] * 5, known)


def watched(rows: Sequence[Sequence[Sample]], factor: float = 1.5) -> list[Slow]:
    watch = StragglerWatch(factor)
    return [slow for row in rows for slow in watch.add([[one] for one in row])]


@pytest.mark.parametrize("size", [2, 3, 4, 1000])
@pytest.mark.parametrize(("part", "slow"), [("data", 0.081), ("compute", 0.095)])
def test_the_slow_rank_is_named_after_two_samples(size, part, slow):
    rows = [[even(place, **({part: slow} if rank == size - 1 else {})) for rank in range(size)] for place in range(9)]
    (found,) = watched(rows)
    assert (found.rank, found.part, found.begin, found.end) == (size - 1, part, 1, 10)
    assert found.seconds == pytest.approx(slow)
    assert found.lost == pytest.approx(0.08)


def test_several_ranks_may_be_slow_as_on_one_host():
    rows = [[even(place, compute=0.1 if rank in (2, 3) else 0.02) for rank in range(8)] for place in range(4)]
    assert [(found.rank, found.part) for found in watched(rows)] == [(2, "compute"), (3, "compute")]


@pytest.mark.parametrize(
    ("usual", "slow", "end"),
    [(0.004, 0.029, 20), (0.015, 0.065, 10), (0.015, 0.026, 230), (0.1, 0.19, 50)],
    ids=["25 ms, clear", "50 ms, clear", "11 ms, less clear", "90 ms, less clear"],
)
def test_what_costs_less_or_is_less_clear_takes_longer_to_be_told(usual, slow, end):
    rows = [[even(place, compute=usual), even(place, compute=slow)] for place in range(60)]
    (found,) = watched(rows)
    assert found.end == end


@pytest.mark.parametrize("compute", [0.018, 0.022])
def test_less_than_the_factor_is_not_told(compute):
    assert watched([[even(place), even(place, compute=compute)] for place in range(400)]) == []


def test_differences_of_less_than_3_ms_are_not_told():
    assert watched([[even(place, compute=0.0005), even(place, compute=0.003)] for place in range(2000)]) == []


def test_another_process_that_takes_half_of_a_core_for_two_seconds_is_not_told():
    rows = [[even(place), even(place, compute=0.03 if place % 60 < 13 else 0.015)] for place in range(400)]
    assert watched(rows) == []


def test_pauses_are_not_told():
    paused = [0.015, 0.015, 4.0, 0.015, 0.015]
    rows = [[even(place), sample(place, [0.001] * 5, paused if place % 3 == 0 else [0.015] * 5)] for place in range(99)]
    assert watched(rows) == []


@pytest.mark.parametrize("size", [2, 4, 16])
def test_work_that_varies_by_itself_is_not_told(size):
    for seed in range(5):
        draw = random.Random(seed)
        rows = [
            [sample(place, [0.001] * 5, [draw.uniform(0.3, 0.6) for _ in range(5)]) for _ in range(size)]
            for place in range(400)
        ]
        assert watched(rows) == [], seed


def test_a_slow_rank_is_found_among_varying_ones():
    draw = random.Random(0)
    rows = [
        [
            sample(place, [0.001] * 5, [draw.uniform(0.3, 0.6) + 0.8 * (rank == 2 and place > 50) for _ in range(5)])
            for rank in range(4)
        ]
        for place in range(100)
    ]
    (found,) = watched(rows)
    assert (found.rank, found.part) == (2, "compute")
    assert found.end <= 5 * 55


def test_without_the_wait_for_others_only_data_count():
    busy = [[even(place, known=False, compute=0.095), even(place, known=False)] for place in range(9)]
    assert watched(busy) == []
    waiting = [
        [even(place, known=False, compute=0.095), even(place, known=False, data=0.08)] for place in range(9)
    ]  # rank 0 waits for rank 1 in its forward pass
    assert [(found.rank, found.part) for found in watched(waiting)] == [(1, "data")]


def test_it_is_told_once_and_again_when_it_changes():
    def rows(begin: int, end: int, **slow: float) -> list[list[Sample]]:
        return [[even(place), even(place, **slow)] for place in range(begin, end)]

    found = watched([*rows(0, 20, compute=0.1), *rows(20, 40, data=0.1), *rows(40, 60), *rows(60, 80, data=0.1)])
    told = [(slow.part, slow.end) for slow in found]
    assert told == [("compute", 10), ("data", 110), (None, 220), ("data", 310)]


def test_what_is_said():
    slow = Slow(2, "compute", 41, 60, 0.0951, 0.0149, 0.08)
    assert described(slow, 4, "node1") == (
        "rank 2 of 4 (on node1) is slow: its forward and backward passes take 95.1 ms, the median of the others is "
        "14.9 ms (iterations 41 to 60). All ranks wait for it, 80 ms in each step"
    )
    assert "it waits 2.5 s for each batch, rank 1 1 ms" in described(Slow(0, "data", 1, 10, 2.5, 0.001, 2.4), 2)


@pytest.mark.parametrize("factor", [0, 1, "1.5", math.nan])
def test_a_wrong_factor_is_refused(factor):
    with pytest.raises(ConfigError, match=f"`slow_factor` must be a finite number above 1, but is {factor!r}"):
        LoggerHook(slow_factor=factor)


def test_a_rank_whose_host_is_as_fast_as_the_others_is_not_called_slow():
    def rows(**second: Any) -> list[list[Sample]]:
        ahead = {"host": second.pop("other_host"), "is_host_bound": False}
        return [
            [even(place)._replace(**ahead), even(place, **second)._replace(is_host_bound=True)] for place in range(9)
        ]

    assert watched(rows(compute=0.1, other_host=0.1)) == []  # the other host has begun earlier, and stays ahead
    assert [slow.part for slow in watched(rows(compute=0.1, other_host=0.02))] == ["compute"]
    assert [slow.part for slow in watched(rows(data=0.1, other_host=0.1))] == ["data"]


def test_samples_that_some_ranks_send_later_are_compared_with_those_of_the_same_iterations():
    watch = StragglerWatch(1.5)
    healthy, slow = [even(place) for place in range(2)], [even(place, compute=0.1) for place in range(2)]
    assert watch.add([healthy, slow[:1]]) == []
    (found,) = watch.add([[], slow[1:]])
    assert (found.rank, found.begin, found.end) == (1, 1, 10)


SECONDS = 0.05
ITERATIONS = 10


class Pausing(nn.Module):
    """Takes longer on rank 1."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        if get_rank() == 1:
            time.sleep(SECONDS)
        return self.layer(x).sum()


class Holding(nn.Module):
    """Holds a part that takes longer on rank 1."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, x: Tensor) -> Tensor:
        return self.part(x)


def separately(module: nn.Module) -> MMSeparateDistributedDataParallel:
    return MMSeparateDistributedDataParallel(Holding(module))


def measured(model: nn.Module, syncs: Callable[[int], bool] = lambda number: True) -> tuple[float | None, list[Sample]]:
    """Return what a rank measures of its work in some iterations."""
    work, hub = OwnWork(model, interval=ITERATIONS), MessageHub()
    work.begin()
    for number in range(1, ITERATIONS + 1):
        hub.update_scalar("train/data_time", 0.0)
        with nullcontext() if syncs(number) else model.no_sync():
            loss = model(torch.ones(2, 4))
            context = model.backward_context(loss, syncs=syncs(number)) if hasattr(model, "clock") else nullcontext()
            with context:
                loss.backward()
        work.note(number, hub)
    found = work.take()
    work.close()
    return found


@ranks(2)
@pytest.mark.parametrize("kind", [MMDistributedDataParallel, DistributedDataParallel, separately])
def test_ranks_wait_for_the_slowest(kind: Any):
    waited, samples = measured(kind(Pausing()))
    assert [(sample.end, sample.iterations) for sample in samples] == [(5, 5), (10, 5)]
    assert waited is not None
    # The other rank began to wait when this one fell asleep; a busy machine only makes that longer.
    if get_rank() == 0:
        assert waited > 0.5 * SECONDS
    else:
        assert all(sample.compute >= SECONDS for sample in samples)


@ranks(2)
def test_iterations_without_an_exchange_wait_for_nobody():
    waited, samples = measured(MMDistributedDataParallel(Pausing()), syncs=lambda number: number == ITERATIONS)
    assert waited is not None
    assert waited < 0.5 * SECONDS * (ITERATIONS if get_rank() == 0 else 1)
    assert len(samples) == 2


def test_the_wait_is_not_known_where_no_gradients_are_exchanged():
    waited, samples = measured(nn.Sequential(Pausing()))
    assert waited is None
    assert all(math.isnan(sample.compute) and sample.low_work == 0 for sample in samples)
