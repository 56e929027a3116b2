"""Orders: from any position, on any number of ranks, and small."""

from __future__ import annotations

import tracemalloc
from itertools import islice
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.dataset import DefaultSampler, InfiniteSampler
from lockstep.testing import run_ranks

MIB = 2**20


def rest_of(kind: type, size: int, position: int) -> list[int]:
    sampler = kind(range(size), seed=3)
    sampler.begin_at(position)
    return list(islice(sampler, 2 * size))


@pytest.mark.parametrize("kind", [DefaultSampler, InfiniteSampler])
@settings(max_examples=25, deadline=None)
@given(size=st.integers(3, 40), world_size=st.integers(1, 3), data=st.data())
def test_from_any_position_any_number_of_ranks_go_on_in_one_order(kind, size, world_size, data):
    position = data.draw(st.integers(0, size if kind is DefaultSampler else 3 * size))
    if kind is DefaultSampler:
        order = list(DefaultSampler(range(size), seed=3, shard=(0, 1)))
        rest = order[position:]
        rest += order[: -len(rest) % world_size]
    else:
        alone = InfiniteSampler(range(size), seed=3, shard=(0, 1))
        rest = list(islice(alone, position, position + 2 * size * world_size))
    parts = run_ranks(world_size, rest_of, kind, size, position)
    assert parts == [rest[rank::world_size] for rank in range(world_size)]


def test_an_epoch_that_began_in_another_order_is_told_of(caplog):
    before = DefaultSampler(range(50), seed=0)
    next(iter(before))
    after = DefaultSampler(range(50), seed=1)
    after.begin_at(20, before.head)
    assert list(after) == list(DefaultSampler(range(50), seed=1))[20:]
    assert "begins with other items than in the run that is resumed" in caplog.text


def test_an_order_is_that_of_randperm():
    expected = torch.randperm(100, generator=torch.Generator().manual_seed(4 + 2)).tolist()
    sampler = DefaultSampler(range(100), seed=4)
    sampler.set_epoch(2)
    assert list(sampler) == expected


def most_held(function: Any) -> int:
    tracemalloc.start()
    try:
        function()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(("size", "shuffle"), [(10**6, True), (10**7, True), (10**10, False)])
def test_memory_does_not_grow_with_the_data(size, shuffle):
    """Of numpy and Python; the order that is drawn is torch's, and has 4 bytes a sample."""

    def begin() -> None:
        for sampler in (DefaultSampler(range(size), shuffle, 0), InfiniteSampler(range(size), shuffle, 0)):
            for position in (0, size // 2, size - 10):
                sampler.begin_at(position)
                assert len(list(islice(sampler, 10))) == 10

    assert most_held(begin) < 1 * MIB
