"""A pass that begins inside the global order: what each shard gets of the rest, and how much that is."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, Sampler

from lockstep.dataset import DefaultSampler, ShardedSampler, build_dataloader
from lockstep.dataset.position import Position, batches_from, begun_at, global_order_of, head_of, without_batches
from lockstep.dataset.random_state import random_state, set_random_state
from lockstep.dataset.stream import StreamLoader, StreamShard

SEED = 5


class Stream(IterableDataset[int]):
    def __init__(self, size: int) -> None:
        self.size, self.made = size, 0

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[int]:
        for index in range(self.size):
            self.made += 1
            yield index


class Backwards(Sampler[int]):
    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[int]:
        return iter(reversed(range(self.size)))

    def __len__(self) -> int:
        return self.size


def loader_of(kind: str, size: int, shard: tuple[int, int], batch_size: int, drop_last: bool, round_up: bool) -> Any:
    more: dict[str, Any] = {"batch_size": batch_size, "drop_last": drop_last}
    if kind == "stream":
        return StreamLoader(StreamShard(Stream(size), shard, batch_size), torch.tensor, **more)
    sampler: Any = DefaultSampler(range(size), seed=SEED, shard=shard, round_up=round_up)
    if kind == "own sampler":
        sampler = ShardedSampler(Backwards(size), SEED, round_up, shard, batch_size)
    if kind == "distributed":
        sampler = DistributedSampler(range(size), shard[1], shard[0], seed=SEED)  # type: ignore[arg-type]
    return DataLoader(range(size), sampler=sampler, collate_fn=torch.tensor, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["default", "own sampler", "distributed", "stream"])
@settings(max_examples=60)
@given(
    size=st.integers(1, 25),
    shards=st.integers(1, 4),
    batch_size=st.integers(1, 4),
    part=st.floats(0, 1),
    drop_last=st.booleans(),
    round_up=st.booleans(),
)
def test_the_rest_is_dealt_anew(kind, size, shards, batch_size, part, drop_last, round_up):
    if round_up or kind == "distributed":
        size = max(size, shards)
    round_up = round_up if kind in ("default", "own sampler") else kind == "distributed"
    position = round(part * size)
    loaders = [loader_of(kind, size, (rank, shards), batch_size, drop_last, round_up) for rank in range(shards)]
    deals = {global_order_of(loader) for loader in loaders}
    (deal,) = deals
    assert deal is not None
    assert (deal.unit, deal.total, deal.global_batch) == ("samples", size, shards * batch_size)
    passes = [[batch.tolist() for batch in begun_at(loader, position)] for loader in loaders]
    for rank, batches in enumerate(passes):
        share = deal.share(position, rank)
        assert [len(batch) for batch in batches] == [deal.size_of(index, share) for index in range(len(batches))]
        assert deal.size_of(len(batches), share) == 0
    assert deal.batches_after(position) == max(map(len, passes))
    order = list(range(size))
    if kind in ("default", "distributed"):
        order = torch.randperm(size, generator=torch.Generator().manual_seed(SEED)).tolist()
    if kind == "own sampler":
        order.reverse()
    rest = order[position:]
    rest += order[: -len(rest) % shards] if round_up else []
    for rank, batches in enumerate(passes):
        own, seen = rest[rank::shards], list(chain.from_iterable(batches))
        assert seen == own[: len(seen)]
        assert len(own) - len(seen) < (batch_size if drop_last else 1)
    # The next pass is a whole one.
    again = [batch.tolist() for batch in loaders[0]]
    whole = [batch.tolist() for batch in loader_of(kind, size, (0, shards), batch_size, drop_last, round_up)]
    assert again == whole


def test_a_stream_is_made_again_up_to_there_before_the_first_batch_is_asked_for(caplog):
    data = Stream(10)
    loader = build_dataloader({"dataset": data, "batch_size": 2}, seed=0)
    batches = iter(begun_at(loader, 4))
    assert data.made == 4
    assert [batch.tolist() for batch in batches] == [[4, 5], [6, 7], [8, 9]]
    assert "4 samples of Stream are made again and discarded" in caplog.text


@pytest.mark.parametrize("kind", ["default", "own sampler"])
def test_another_order_is_told(kind, caplog):
    loader = loader_of(kind, 20, (0, 1), 3, False, False)
    assert len(list(loader)) == 7
    head = head_of(loader)
    assert len(head) == 8
    list(begun_at(loader, 6, head))
    assert not caplog.records
    list(begun_at(loader, 6, [*head[:-1], 99]))
    list(loader)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "the order of epoch 1 begins with other items than in the run that is resumed" in record.message


class Counting(list[int]):
    read = 0

    def __getitem__(self, index: Any) -> Any:
        self.read += 1
        return super().__getitem__(index)


class OwnBatches(BatchSampler):
    """Not torch's own."""


@pytest.mark.parametrize(
    ("batching", "first", "read"),
    [
        ({"sampler": Backwards(9), "batch_size": 2}, [4, 3], 5),
        ({"batch_sampler": OwnBatches(Backwards(9), 2, False)}, [4, 3], 5),
        ({"sampler": Backwards(9), "batch_size": None}, [6], 7),
    ],
)
def test_batches_of_a_sampler_that_is_not_known_are_left_out_without_reading(batching, first, read):
    data = Counting(range(9))
    loader = DataLoader(data, **batching)
    rest = [torch.as_tensor(batch).flatten().tolist() for batch in without_batches(loader, 2)]
    assert (rest[0], data.read) == (first, read)
    assert len(list(loader)) == len(loader) == len(rest) + 2


def test_what_else_there_is_has_to_be_read():
    assert without_batches([1, 2], 1) is None
    assert without_batches(DataLoader(Stream(3)), 1) is None


class Drawing(Sampler[int]):
    """Draws each index from torch's global generator."""

    def __iter__(self) -> Iterator[int]:
        return (int(torch.randint(1000, ())) for _ in range(8))


def test_what_is_left_out_is_drawn_before_the_random_state_is_set_to_go_on():
    rest = iter(without_batches(DataLoader(range(1000), batch_size=2, sampler=Drawing()), 2))  # type: ignore[arg-type]
    torch.manual_seed(1)
    expected = [int(torch.randint(1000, ())) for _ in range(4)]
    torch.manual_seed(1)
    assert torch.cat(list(rest)).tolist() == expected


def test_batches_of_loaders_that_begin_nowhere_else_are_discarded(caplog):
    assert list(batches_from([1, 2, 3], Position(batches=2))) == [3]
    assert "2 batches of list are read and discarded" in caplog.text


@pytest.mark.parametrize("kind", ["default", "own sampler", "distributed", "stream"])
def test_a_position_is_a_value_that_gives_the_same_batches_again(kind):
    loader = loader_of(kind, 11, (0, 1), 2, False, False)
    state = random_state()
    begin = Position(batches=9, items=3, random=state)  # of other sizes before
    seen = []
    for _ in range(2):
        torch.rand(3)
        batches = batches_from(loader, begin)
        assert torch.equal(torch.get_rng_state(), state["torch"])
        seen.append([batch.tolist() for batch in batches])
    assert [len(batch) for batch in seen[0]] == [2, 2, 2, 2]
    assert seen[0] == seen[1]
    whole = [batch.tolist() for batch in batches_from(loader, Position(batches=9, items=0))]
    assert list(chain(*seen[0])) == list(chain(*whole))[3:]


def test_random_states_are_plain_and_exact():
    random.seed(3)
    np.random.seed(3)
    random.gauss(0, 1)  # Python and numpy keep the second of two numbers
    np.random.randn()
    torch.manual_seed(3)
    state = random_state()
    kinds = {type(value) for part in state.values() if isinstance(part, dict) for value in part.values()}
    assert kinds <= {int, float, str, type(None), torch.Tensor}

    def draw() -> list[float]:
        return [random.gauss(0, 1), random.random(), np.random.randn(), np.random.rand(), torch.rand(()).item()]

    drawn = draw()
    set_random_state(state)
    assert draw() == drawn
