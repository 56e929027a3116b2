"""How many samples a pass will yield, where that is sure."""

from __future__ import annotations

import pytest
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler, SequentialSampler

from lockstep.dataset import DefaultSampler, InfiniteSampler
from lockstep.dataset.position import ENDLESS, certain_amount, global_order_of


class Boastful(SequentialSampler):
    def __len__(self) -> int:
        return 100


class Lazy(Sampler[int]):
    def __iter__(self):
        return iter([0])


class Stream(IterableDataset[int]):
    def __iter__(self):
        return iter(range(5))


@pytest.mark.parametrize("drop_last", [True, False])
def test_it_is_what_a_pass_yields(drop_last):
    loader = DataLoader(range(7), batch_size=3, sampler=DefaultSampler(range(7), seed=0), drop_last=drop_last)
    order = global_order_of(loader)
    sizes = [len(batch) for batch in loader]
    assert [order.size_of(index, order.share(0, 0)) for index in range(5)] == sizes + [0] * (5 - len(sizes))
    assert certain_amount(loader) == (7, 3, drop_last)


def test_there_may_be_no_end():
    loader = DataLoader(range(7), batch_size=3, sampler=InfiniteSampler(range(7), seed=0))
    order = global_order_of(loader)
    assert (order.share(0, 0), order.size_of(10**6, order.share(0, 0))) == (ENDLESS, 3)
    assert certain_amount(loader) == (ENDLESS, 3, False)


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
    assert certain_amount(loader) is None
