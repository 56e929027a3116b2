"""A stream of samples without an end."""

from __future__ import annotations

from itertools import chain, islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.dataset import DefaultSampler, InfiniteSampler, length_of
from lockstep.dataset.loader import build_dataloader
from lockstep.errors import ConfigError
from lockstep.testing import ranks, run_ranks


def taken(length: int, count: int, skipped: int = 0, **kwargs) -> list[int]:
    sampler = InfiniteSampler(range(length), **kwargs)
    sampler.begin_at(skipped * sampler.world_size)
    return list(islice(sampler, count))


@settings(max_examples=30)
@given(length=st.integers(1, 20), size=st.integers(1, 4), shuffle=st.booleans(), skipped=st.integers(0, 50))
def test_one_stream_is_dealt_to_any_number_of_ranks(length, size, shuffle, skipped):
    kwargs = {"shuffle": shuffle, "seed": 3}
    stream = []
    for epoch in range(220 // length + 1):
        sampler = DefaultSampler(range(length), **kwargs, shard=(0, 1))
        sampler.set_epoch(epoch)
        stream += sampler
    parts = run_ranks(size, taken, length, 5, skipped, **kwargs)
    dealt = list(chain.from_iterable(zip(*parts, strict=True)))
    assert dealt == stream[skipped * size :][: 5 * size]


class Growing:
    def __len__(self) -> int:
        raise NotImplementedError


def test_what_refuses_to_tell_its_length_has_none():
    assert length_of(Growing()) is length_of(iter(())) is None
    assert length_of([1, 2]) == 2


@ranks(2)
def test_in_a_loader_it_has_the_runs_seed_and_no_length():
    loader = build_dataloader({"dataset": range(7), "sampler": {"type": "InfiniteSampler"}, "batch_size": 2}, seed=5)
    assert loader.sampler.seed == 5
    assert length_of(loader) is None
    assert list(islice(loader.sampler, 3)) == taken(7, 3, seed=5)


def test_skipping_is_for_one_pass():
    sampler = InfiniteSampler(range(5), seed=0)
    whole = list(islice(sampler, 12))
    sampler.begin_at(7)
    assert list(islice(sampler, 5)) == whole[7:]
    assert list(islice(sampler, 12)) == whole


def test_another_order_is_told_in_whatever_epoch(caplog):
    def begin(position: int, head: list[int], **changes: int) -> None:
        sampler = InfiniteSampler(range(50), seed=changes.get("seed", 0))
        sampler.begin_at(position, head)
        next(iter(sampler))

    saved, epochs = InfiniteSampler(range(50), seed=0), DefaultSampler(range(50), seed=0)
    ahead = iter(saved)
    for _ in range(160):  # as workers read ahead, here into the next epoch but two
        next(ahead)
    epochs.set_epoch(1)
    next(iter(epochs))
    assert saved.head_of(1) == epochs.head != saved.head_of(2)
    begin(70, epochs.head)
    assert not caplog.records
    begin(70, epochs.head, seed=1)
    assert "the order of epoch 2 begins with other items than in the run that is resumed" in caplog.text


def test_there_must_be_something():
    with pytest.raises(ConfigError, match=r"at least one sample, but has none \(rank 0 of 1\)"):
        InfiniteSampler([])
