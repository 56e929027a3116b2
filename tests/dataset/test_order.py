"""Orders that are computed position by position: complete, random by the measures of `randperm`, and small."""

from __future__ import annotations

import math
import tracemalloc
from collections import Counter
from itertools import islice, permutations
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from lockstep.dataset import DefaultSampler, InfiniteSampler
from lockstep.dataset import order as order_module
from lockstep.dataset.order import MOST_DRAWN, computed_order, drawn_order
from lockstep.testing import run_ranks

MIB = 2**20
REPEATS = 8  # seeds, and epochs of each


def whole(kind: str, size: int, seed: int, epoch: int) -> NDArray[np.int64]:
    positions = np.arange(size)
    if kind == "computed":
        return computed_order(size, seed, epoch)(positions)
    return drawn_order(size, torch.Generator().manual_seed(1000 * seed + epoch))(positions).astype(np.int64)


@given(size=st.integers(1, 3000), seed=st.integers(-(2**63), 2**64), epoch=st.integers(0, 2**33))
def test_each_index_comes_once(size, seed, epoch):
    assert sorted(whole("computed", size, seed, epoch).tolist()) == list(range(size))


@given(size=st.integers(1, 10**12), part=st.floats(0, 1))
@settings(max_examples=20)
def test_a_position_is_computed_by_itself(size, part):
    order = computed_order(size, 1, 2)
    first = round(part * (size - 1))
    several = order(np.arange(first, min(size, first + 50)))
    assert len(set(several.tolist())) == len(several)
    assert (several >= 0).all()
    assert (several < size).all()
    assert order(np.array([first])).tolist() == several[:1].tolist()


def test_the_order_stays_the_same_in_all_versions():
    """A checkpoint says how many samples of it have been taken."""
    assert computed_order(10**9, 0, 0)(np.arange(4)).tolist() == [1392934, 786282683, 588058104, 386139874]
    assert computed_order(10**9, 5, 3)(np.array([0, 10**9 - 1])).tolist() == [371527201, 619674247]


def surplus(counts: NDArray[Any], expected: NDArray[Any] | float) -> float:
    """Return by how many standard deviations a sum of squares is larger than by chance (chi-square)."""
    free = counts.size - 1
    return float((((counts - expected) ** 2 / expected).sum() - free) / math.sqrt(2 * free))


def distances(pairs: list[tuple[NDArray[np.int64], NDArray[np.int64]]], size: int) -> float:
    """Return how uneven the distances of pairs of samples are, from 1 to size - 1."""
    found = sum(np.bincount((one - other) % size, minlength=size) for one, other in pairs)
    return surplus(found[1:].reshape(-1, size // 64).sum(1), found[1:].sum() / 64)


def inversions(order: NDArray[np.int64]) -> int:
    """Count the pairs of positions whose samples are in the opposite order."""
    if len(order) <= 64:
        return int(np.triu(order[:, None] > order).sum())
    first, second = np.split(order, [len(order) // 2])
    between = len(first) - np.searchsorted(np.sort(first), second)
    return inversions(first) + inversions(second) + int(between.sum())


def cycles(order: NDArray[np.int64]) -> int:
    """Count the cycles that lead from each position to that of its index."""
    left, found = dict(enumerate(order.tolist())), 0
    while left:
        found, (_, place) = found + 1, left.popitem()
        while place in left:
            place = left.pop(place)
    return found


def measures(kind: str, size: int) -> dict[str, float]:
    """Return by how many standard deviations orders of several seeds and epochs differ from random ones."""
    orders = [[whole(kind, size, seed, epoch) for epoch in range(REPEATS)] for seed in range(REPEATS)]
    each = [order for orders_of_seed in orders for order in orders_of_seed]
    count, side = len(each), math.isqrt(size - 1) + 1
    found = {}
    grids = [np.histogram2d(np.arange(size), order, 16, [[0, size], [0, size]])[0] for order in each]
    widths = np.diff(np.ceil(np.arange(17) * size / 16))
    expected = np.outer(widths, widths) / size
    found["where samples are"] = surplus(np.sum(grids, axis=0), count * expected)
    in_one = [surplus(grid, expected) for grid in grids]
    found["where they are in one order"] = float(np.mean(in_one)) + 30 / math.sqrt(2 * 255)  # rows and columns are full
    for lag in (1, 2, side - 1, side, side + 1, 2 * side):  # among them neighbours in the table
        pairs = [(order[lag:], order[:-lag]) for order in each]
        found[f"distances after {lag}"] = distances(pairs, size)
        near, mean = sum(int((abs(one - other) == 1).sum()) for one, other in pairs), count * (size - lag) * 2 / size
        found[f"neighbours after {lag}"] = (near - mean) / math.sqrt(mean)
    others = [(orders[i][j], orders[i][j + 1]) for i in range(REPEATS) for j in range(REPEATS - 1)]
    others += [(orders[j][i], orders[j + 1][i]) for i in range(REPEATS) for j in range(REPEATS - 1)]
    found["distances between seeds and epochs"] = distances(others, size)
    alike = sum(int((one == other).sum()) for one, other in others)
    found["alike in seeds and epochs"] = (alike - len(others)) / math.sqrt(len(others))
    fixed = sum(int((order == np.arange(size)).sum()) for order in each)
    found["fixed points"] = (fixed - count) / math.sqrt(count)
    harmonic, squares = (sum(k**-power for k in range(1, size + 1)) for power in (1, 2))
    found["cycles"] = (sum(map(cycles, each)) - count * harmonic) / math.sqrt(count * (harmonic - squares))
    mean, variance = size * (size - 1) / 4, size * (size - 1) * (2 * size + 5) / 72
    found["inversions"] = (sum(map(inversions, each)) - count * mean) / math.sqrt(count * variance)
    return found


@pytest.mark.parametrize("size", [64 * 64 + 1, 65 * 65])  # with 63 places of the table that are empty, and none
@pytest.mark.parametrize("kind", ["drawn", "computed"])
def test_it_is_as_random_as_randperm(kind, size):
    assert {name: value for name, value in measures(kind, size).items() if abs(value) > 4} == {}


def test_the_measures_tell_too_few_rounds(monkeypatch):
    monkeypatch.setattr(order_module, "_ROUNDS", 2)
    assert measures("computed", 65 * 65)["distances after 65"] > 100


@pytest.mark.parametrize("kind", ["drawn", "computed"])
def test_all_orders_of_a_few_samples_are_equally_likely(kind):
    found = Counter(tuple(whole(kind, 4, seed, 0).tolist()) for seed in range(2400))
    assert abs(surplus(np.array([found[order] for order in permutations(range(4))]), 100)) < 4


def rest_of(kind: type, computed: bool, size: int, position: int) -> list[int]:
    sampler = kind(range(size), seed=3, computed=computed)
    sampler.begin_at(position)
    return list(islice(sampler, 2 * size))


@pytest.mark.parametrize("computed", [True, False])
@pytest.mark.parametrize("kind", [DefaultSampler, InfiniteSampler])
@settings(max_examples=25, deadline=None)
@given(size=st.integers(3, 40), world_size=st.integers(1, 3), data=st.data())
def test_from_any_position_any_number_of_ranks_go_on_in_one_order(kind, computed, size, world_size, data):
    position = data.draw(st.integers(0, size if kind is DefaultSampler else 3 * size))
    if kind is DefaultSampler:
        order = list(DefaultSampler(range(size), seed=3, computed=computed, shard=(0, 1)))
        rest = order[position:]
        rest += order[: -len(rest) % world_size]
    else:
        alone = InfiniteSampler(range(size), seed=3, computed=computed, shard=(0, 1))
        rest = list(islice(alone, position, position + 2 * size * world_size))
    parts = run_ranks(world_size, rest_of, kind, computed, size, position)
    assert parts == [rest[rank::world_size] for rank in range(world_size)]


def test_an_epoch_that_began_in_the_other_kind_of_order_is_told_of(caplog):
    before = DefaultSampler(range(50), seed=0, computed=False)
    next(iter(before))
    after = DefaultSampler(range(50), seed=0, computed=True)
    after.begin_at(20, before.head)
    assert list(after) == whole("computed", 50, 0, 0)[20:].tolist()
    assert "begins with other items than in the run that is resumed" in caplog.text
    assert "such as `computed`" in caplog.text


def test_large_data_is_computed_and_small_is_drawn():
    assert not DefaultSampler(range(MOST_DRAWN), seed=0).computed
    assert DefaultSampler(range(MOST_DRAWN + 1), seed=0).computed
    assert InfiniteSampler(range(MOST_DRAWN + 1), seed=0).computed
    small = DefaultSampler(range(100), seed=4)
    assert list(small) == torch.randperm(100, generator=torch.Generator().manual_seed(4)).tolist()


def most_held(function: Any) -> int:
    tracemalloc.start()
    try:
        function()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("size", [10**6, 10**7, 10**8, 10**9, 10**10])
@pytest.mark.parametrize("shuffle", [True, False])
def test_memory_does_not_grow_with_the_data(size, shuffle):
    """Of numpy and Python; the order that is drawn is torch's, and has 4 bytes a sample."""

    def begin() -> None:
        for sampler in (DefaultSampler(range(size), shuffle, 0), InfiniteSampler(range(size), shuffle, 0)):
            for position in (0, size // 2, size - 10):
                sampler.begin_at(position)
                assert len(list(islice(sampler, 10))) == 10

    assert most_held(begin) < 1 * MIB + (100 * math.isqrt(size) if size > MOST_DRAWN else 0)
    assert 4 * MOST_DRAWN <= 32 * MIB
