"""One global order, dealt out to the ranks."""

from __future__ import annotations

from itertools import chain, zip_longest

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.dataset import DefaultSampler
from lockstep.dist import get_dist_info
from lockstep.registry import DATA_SAMPLERS
from lockstep.testing import ranks, run_ranks

ABSENT = object()


def shares(length: int, epoch: int, **kwargs) -> tuple[list[int], int]:
    sampler = DefaultSampler(range(length), **kwargs)
    sampler.set_epoch(epoch)
    return list(sampler), len(sampler)


def dealt(parts: list[list[int]]) -> list[int]:
    """Return the order that these shares were dealt from."""
    return [i for i in chain.from_iterable(zip_longest(*parts, fillvalue=ABSENT)) if i is not ABSENT]


@settings(max_examples=30)
@given(
    length=st.integers(4, 40),
    size=st.integers(1, 4),
    shuffle=st.booleans(),
    seed=st.integers(0, 5),
    epoch=st.integers(0, 3),
)
def test_the_global_order_depends_on_seed_and_epoch_alone(length, size, shuffle, seed, epoch):
    kwargs = {"shuffle": shuffle, "seed": seed}
    (alone, _) = shares(length, epoch, round_up=False, **kwargs)
    assert sorted(alone) == list(range(length))

    exact = run_ranks(size, shares, length, epoch, round_up=False, **kwargs)
    assert dealt([part for part, _ in exact]) == alone
    padded = run_ranks(size, shares, length, epoch, round_up=True, **kwargs)
    assert len({len(part) for part, _ in padded}) == 1
    assert dealt([part for part, _ in padded])[:length] == alone
    assert dealt([part for part, _ in padded])[length:] == alone[: -length % size]
    for part, announced in exact + padded:
        assert announced == len(part)


def test_epochs_and_seeds_shuffle_differently():
    orders = [shares(50, epoch, seed=seed)[0] for epoch, seed in [(0, 0), (1, 0), (0, 7)]]
    assert len({tuple(order) for order in orders}) == 3


@ranks(2)
def test_without_a_seed_ranks_agree_on_one():
    rank, world_size = get_dist_info()
    torch.manual_seed(rank)
    sampler = DefaultSampler(range(10))
    order = torch.randperm(10, generator=torch.Generator().manual_seed(sampler.seed)).tolist()
    assert list(sampler) == order[rank::world_size]


@ranks(4)
@pytest.mark.parametrize("shuffle", [True, False])
def test_fewer_samples_than_ranks_are_refused_in_training_and_fine_in_evaluation(shuffle):
    rank, _ = get_dist_info()
    with pytest.raises(ValueError, match=rf"at least 4 samples, one for each rank, but has 3 \(rank {rank} of 4\)"):
        DefaultSampler(range(3), shuffle=shuffle, seed=0)
    share = list(DefaultSampler(range(3), shuffle=shuffle, seed=0, round_up=False))
    assert len(share) == (1 if rank < 3 else 0)


def test_skipping_leaves_out_the_first_samples_of_one_pass():
    sampler = DefaultSampler(range(10), seed=3)
    whole = list(sampler)
    sampler.begin_at(4)
    assert list(sampler) == whole[4:]
    assert list(sampler) == whole
    assert len(sampler) == 10


def test_the_sampler_has_a_name():
    assert DATA_SAMPLERS["DefaultSampler"] is DefaultSampler
