"""How many samples a pass will yield, where that is sure."""

from __future__ import annotations

import pytest
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler, SequentialSampler

from lockstep.dataset import DefaultSampler, InfiniteSampler, amount_of
from lockstep.dataset.position import ENDLESS


class Boastful(SequentialSampler):
    def __len__(self) -> int:
        return 100


class Lazy(Sampler[int]):
    def __iter__(self):
        return iter([0])


class Stream(IterableDataset[int]):
    def __iter__(self):
        return iter(range(5))


@pytest.mark.parametrize("sampler", [None, DefaultSampler(range(7), seed=0), SequentialSampler(range(7))])
@pytest.mark.parametrize("drop_last", [True, False])
def test_it_is_what_a_pass_yields(sampler, drop_last):
    loader = DataLoader(range(7), batch_size=3, sampler=sampler, drop_last=drop_last)
    amount = amount_of(loader)
    sizes = [len(batch) for batch in loader]
    assert [amount.size_of(index) for index in range(5)] == sizes + [0] * (5 - len(sizes))


def test_there_may_be_no_end():
    amount = amount_of(DataLoader(range(7), batch_size=3, sampler=InfiniteSampler(range(7), seed=0)))
    assert (amount.samples, amount.size_of(10**6)) == (ENDLESS, 3)


@pytest.mark.parametrize(
    "loader",
    [
        [1, 2],
        DataLoader(Stream()),
        DataLoader(range(7), batch_sampler=[[0, 1], [2]]),
        DataLoader(range(7), batch_sampler=BatchSampler(Boastful(range(7)), 2, False)),
        DataLoader(range(7), sampler=Lazy()),
        DataLoader(range(7), batch_size=None),
    ],
)
def test_where_it_is_not_sure_nothing_is_said(loader):
    assert amount_of(loader) is None
