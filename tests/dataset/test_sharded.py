"""Samplers that know no ranks: drawn alike on all of them, and dealt out."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from itertools import chain, islice
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from lockstep.dataset import DefaultSampler, ShardedSampler, build_dataloader, is_rank_aware, length_of, set_epoch
from lockstep.dataset.position import CountedBatches, begun_at, certain_amount, global_order_of
from lockstep.dist import all_gather_object, get_rank, get_world_size
from lockstep.errors import ConfigError
from lockstep.runner.uneven_inputs import EvenBatches
from lockstep.testing import ranks, run_ranks

DATA = list(range(24))
WEIGHTS = [float(index % 5 + 1) for index in DATA]


class Own(Sampler[int]):
    """Draws from every global generator, one item after the other."""

    def __iter__(self) -> Iterator[int]:
        for _ in range(12):
            yield (int(torch.randint(24, ())) + random.randrange(24) + np.random.randint(24)) % 24

    def __len__(self) -> int:
        return 12


class Endless(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        while True:
            yield from torch.randperm(24).tolist()


class Held(Sampler[int]):
    """Draws from generators of its own, which no two ranks have seeded alike."""

    def __init__(self) -> None:
        self.torch, self.python = torch.Generator(), random.Random()
        self.torch.seed()
        self.numpy, self.legacy = np.random.default_rng(), np.random.RandomState()

    def __iter__(self) -> Iterator[int]:
        for _ in range(12):
            drawn = int(torch.randint(24, (), generator=self.torch)) + self.python.randrange(24)
            yield int(drawn + self.numpy.integers(24) + self.legacy.randint(24)) % 24


SAMPLERS = {
    "weighted": lambda: WeightedRandomSampler(WEIGHTS, 12),
    "subset": lambda: SubsetRandomSampler(range(0, 24, 2)),
    "replacement": lambda: RandomSampler(DATA, replacement=True),
    "fewer": lambda: RandomSampler(DATA, num_samples=12),
    "generator": lambda: RandomSampler(DATA, replacement=True, generator=torch.Generator().manual_seed(get_rank())),
    "own": Own,
    "endless": Endless,
    "held": Held,
    "list": lambda: [3, 3, 5, 7, 1, 2, 9, 11],
}
CONFIGS = {
    "weighted": {"type": "WeightedRandomSampler", "weights": WEIGHTS, "num_samples": 12},
    "subset": {"type": "SubsetRandomSampler", "indices": list(range(0, 24, 2))},
    "replacement": {"type": "RandomSampler", "replacement": True},
    "own": {"type": Own},
}


def flat(lists: list[list[Any]]) -> list[Any]:
    return list(chain.from_iterable(lists))


def seen(loader: Any, batches: int = 3) -> list[list[int]]:
    return [torch.as_tensor(batch).flatten().tolist() for batch in islice(loader, batches)]


def global_batches(loader: Any, batches: int = 3) -> list[list[int]]:
    """Return what all ranks see, in the order that it was dealt from."""
    parts = all_gather_object(seen(loader, batches))
    return [[index for row in zip(*step, strict=True) for index in row] for step in zip(*parts, strict=True)]


def epochs_of(loader: DataLoader[int]) -> list[list[list[int]]]:
    epochs = []
    for epoch in (0, 1):
        set_epoch(loader, epoch)
        epochs.append(global_batches(loader))
    return epochs


def from_loader(kind: str) -> Any:
    torch.manual_seed(get_rank())
    random.seed(get_rank())
    loader = DataLoader(DATA, sampler=SAMPLERS[kind](), batch_size=4 // get_world_size())
    return epochs_of(build_dataloader(loader, seed=5))


def from_config(kind: str) -> Any:
    cfg = {"dataset": DATA, "sampler": CONFIGS[kind], "batch_size": 4 // get_world_size()}
    return epochs_of(build_dataloader(cfg, seed=5))


class Rewound(Sampler[int]):
    """Is its own iterator, and begins anew whenever it is asked for one."""

    def __iter__(self) -> Iterator[int]:
        self.rest = [3, 3, 5, 7, 1, 2]
        return self

    def __next__(self) -> int:
        if not self.rest:
            raise StopIteration
        return self.rest.pop(0)


def test_a_sampler_may_be_its_own_iterator():
    loader = build_dataloader(DataLoader(DATA, sampler=Rewound(), batch_size=2), seed=5)
    assert seen(loader, 4) == [[3, 3], [5, 7], [1, 2]]


@pytest.mark.parametrize("kind", SAMPLERS)
def test_the_global_batches_of_any_sampler_are_the_same_on_any_number_of_ranks(kind):
    alone = from_loader(kind)
    assert (alone[0] != alone[1]) == (kind != "list")
    for size in (2, 4):
        for epochs in run_ranks(size, from_loader, kind):
            length = min(len(alone[0]), len(epochs[0]))
            assert [epoch[:length] for epoch in epochs] == [epoch[:length] for epoch in alone]
    if kind in CONFIGS:
        assert run_ranks(2, from_config, kind) == [alone, alone]
        assert from_config(kind) == alone


@ranks(1, 2)
@pytest.mark.parametrize("kind", SAMPLERS)
def test_a_pass_goes_on_where_it_was_and_draws_nothing_from_the_training(kind):
    loader = build_dataloader(DataLoader(DATA, sampler=SAMPLERS[kind](), batch_size=2), seed=5)
    set_epoch(loader, 3)
    whole = seen(loader, 4)
    torch.manual_seed(8)
    random.seed(8)
    np.random.seed(8)
    expected = torch.rand(()), random.random(), np.random.rand()
    torch.manual_seed(8)
    random.seed(8)
    np.random.seed(8)
    set_epoch(loader, 3)
    assert seen(begun_at(loader, 2 * global_order_of(loader).global_batch), 2) == whole[2:]
    assert (torch.rand(()), random.random(), np.random.rand()) == expected
    assert seen(loader, 4) == whole


class Elsewhere(Tensor):
    """Weights on another device: a generator of the CPU can't draw by them."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is torch.multinomial:
            raise RuntimeError("Expected a generator of another device")
        found = super().__torch_function__(function, types, args, kwargs or {})
        return found.as_subclass(Tensor) if function is Tensor.cpu else found


def test_weights_may_be_on_an_accelerator():
    of_host, elsewhere = WeightedRandomSampler(WEIGHTS, 12), WeightedRandomSampler(WEIGHTS, 12)
    elsewhere.weights = elsewhere.weights.as_subclass(Elsewhere)
    assert list(ShardedSampler(elsewhere, seed=5)) == list(ShardedSampler(of_host, seed=5))
    assert type(elsewhere.weights) is Elsewhere  # the sampler of the user's stays as it is


@ranks(4)
def test_in_training_all_ranks_have_equally_many_and_in_evaluation_each_sample_is_seen_once():
    drawn = [7, 7, 1, 4, 2, 9, 8, 8, 8]
    for evaluation, amounts in ((False, [3, 3, 3, 3]), (True, [3, 2, 2, 2])):
        loader = build_dataloader(DataLoader(DATA, sampler=drawn), seed=0, evaluation=evaluation)
        parts = all_gather_object([int(batch) for batch in loader])
        assert list(map(len, parts)) == amounts
        assert len(loader) == amounts[get_rank()]
        assert certain_amount(loader) is not None
        assert global_order_of(loader).share(0, get_rank()) == amounts[get_rank()]
        assert sorted(flat(parts)) == sorted(drawn if evaluation else drawn + drawn[:3])
    with pytest.raises(ConfigError, match=r"at least 4 samples, one for each rank, but has 2 \(rank \d of 4\)"):
        build_dataloader(DataLoader(DATA, sampler=[1, 2]), seed=0)
    few = build_dataloader(DataLoader(DATA, sampler=[1, 2]), seed=0, evaluation=True)
    assert all_gather_object([int(batch) for batch in few]) == [[1], [2], [], []]
    unsized = ShardedSampler(iter([1, 2]), seed=0)
    assert list(unsized) == [[1], [2], [1], [2]][get_rank()]
    assert length_of(DataLoader(DATA, sampler=ShardedSampler(iter([1, 2]), seed=0))) is None


class Buckets(Sampler[list[int]]):
    """Makes batches of unequal sizes, in a random order."""

    def __iter__(self) -> Iterator[list[int]]:
        batches = [[0], [1, 2], [3, 4, 5], [6], [7, 8]]
        for place in torch.randperm(5).tolist():
            yield batches[place]

    def __len__(self) -> int:
        return 5


def batches_seen(loader: DataLoader[int]) -> list[list[list[int]]]:
    return all_gather_object([batch.tolist() for batch in loader])


@ranks(2, 4)
@pytest.mark.parametrize("evaluation", [False, True])
def test_batches_of_a_batch_sampler_are_dealt_out_whole(evaluation):
    torch.manual_seed(get_rank())
    loaders = [
        build_dataloader(DataLoader(DATA, batch_sampler=Buckets()), seed=1, evaluation=evaluation),
        build_dataloader({"dataset": DATA, "batch_sampler": Buckets()}, seed=1, evaluation=evaluation),
        build_dataloader({"dataset": DATA, "batch_sampler": {"type": Buckets}}, seed=1, evaluation=evaluation),
    ]
    parts = batches_seen(loaders[0])
    size = get_world_size()
    assert sorted(flat(parts)) == [[0], [1, 2], [3, 4, 5], [6], [7, 8]]
    assert list(map(len, parts)) == [len(range(rank, 5, size)) for rank in range(size)]
    assert len(loaders[0]) == len(parts[get_rank()])
    assert batches_seen(loaders[1]) == batches_seen(loaders[2]) == parts
    set_epoch(loaders[0], 1)
    other = batches_seen(loaders[0])
    assert other != parts
    assert batches_seen(begun_at(loaders[0], global_order_of(loaders[0]).global_batch)) == [part[1:] for part in other]


class Refilled(Buckets):
    """Fills one list again and again."""

    def __iter__(self) -> Iterator[list[int]]:
        batch: list[int] = []
        for drawn in super().__iter__():
            batch[:] = drawn
            yield batch


@pytest.mark.parametrize("workers", [0, 2])
def test_a_batch_sampler_may_yield_one_list_again(workers: int):
    more = {"num_workers": workers, "multiprocessing_context": "fork"} if workers else {}
    given = DataLoader(DATA, batch_sampler=Refilled(), **more)
    parts = [build_dataloader(given, seed=1, shard=(rank, 2)) for rank in range(2)]
    dealt = [[batch.tolist() for batch in part] for part in parts]
    assert sorted(flat(dealt)) == [[0], [1, 2], [3, 4, 5], [6], [7, 8]]
    for part, seen in zip(parts, dealt, strict=True):
        counted = CountedBatches(part)
        assert [(batch.tolist(), counted.indices) for batch in counted] == [(batch, batch) for batch in seen]


@ranks(2)
def test_torchs_batch_sampler_and_loaders_without_batches():
    given = BatchSampler(WeightedRandomSampler(WEIGHTS, 12), 3, False)
    loader = build_dataloader(DataLoader(DATA, batch_sampler=given), seed=1)
    assert [len(batch) for batch in loader] == [3, 3]
    assert [len(batch) for batch in begun_at(loader, global_order_of(loader).global_batch)] == [3]
    shuffled = build_dataloader(DataLoader(DATA, batch_sampler=BatchSampler(RandomSampler(DATA), 5, True)), seed=1)
    parts = batches_seen(shuffled)
    assert [[len(batch) for batch in part] for part in parts] == [[5, 5], [5, 5]]
    drawn = flat(flat(parts))
    assert len(set(drawn)) == 20
    assert drawn != sorted(drawn)
    single = build_dataloader(DataLoader(DATA[:5], batch_size=None), seed=1)
    assert all_gather_object(list(single)) == [[0, 2, 4], [1, 3]]
    assert list(begun_at(single, global_order_of(single).global_batch)) == ([2, 4], [3])[get_rank()]


class Asks(Sampler[int]):
    """Draws this rank's part, and does not say so."""

    def __iter__(self) -> Iterator[int]:
        return iter(DATA[get_rank() :: get_world_size()])

    def __len__(self) -> int:
        return len(DATA) // get_world_size()


class Unseeded(Sampler[int]):
    """Draws an order of each process's own, which begins with another item in each."""

    def __iter__(self) -> Iterator[int]:
        rest = random.Random(os.urandom(8)).sample(DATA[2:], len(DATA) - 2)
        return iter([get_rank(), *rest, 1 - get_rank()])

    def __len__(self) -> int:
        return len(DATA)


class Wraps(Sampler[list[int]]):
    def __init__(self, sampler: Any) -> None:
        self.inner_sampler = sampler

    def __iter__(self) -> Iterator[list[int]]:
        return ([index] for index in self.inner_sampler)


class Says(Sampler[int]):
    _num_replicas = 2

    def __iter__(self) -> Iterator[int]:
        return iter(DATA[get_rank() * 12 :][:12])


AWARE = {
    "distributed": lambda: {"sampler": DistributedSampler(DATA, shuffle=False)},
    "says": lambda: {"sampler": Says()},
    "inside": lambda: {"batch_sampler": Wraps(Says())},
}


@ranks(2)
@pytest.mark.parametrize("kind", AWARE)
def test_samplers_that_know_ranks_are_left_as_they_are(kind):
    given = DataLoader(DATA, **AWARE[kind]())
    assert is_rank_aware(given)
    assert build_dataloader(given, seed=0) is given
    loader = build_dataloader({"dataset": DATA, **AWARE[kind]()}, seed=0)
    parts = all_gather_object([int(batch) for batch in loader])
    assert sorted(parts[0] + parts[1]) == DATA


@ranks(2)
@pytest.mark.parametrize("kind", [Asks, Unseeded])
def test_a_sampler_that_draws_another_order_on_each_rank_is_an_error_in_the_first_iteration(kind):
    says = rf"{kind.__name__} must draw the same order on each rank.*between rank 0 and rank 1.*attribute `rank`"
    loader = build_dataloader(DataLoader(DATA, sampler=kind()), seed=0)
    with pytest.raises(ConfigError, match=says):
        next(EvenBatches(loader).iterate())


@ranks(2)
def test_split_says_who_deals():
    hidden = {"dataset": DATA, "sampler": DATA[get_rank() :: 2]}
    with pytest.raises(ConfigError, match=r"the sampler differ \(rank \d of 2\)\. Make them the same.*`split=False`"):
        build_dataloader(hidden, seed=0)
    loader = build_dataloader({**hidden, "split": False}, seed=0)
    assert [int(batch) for batch in loader] == DATA[get_rank() :: 2]
    own_data = build_dataloader({"dataset": DATA[get_rank() :: 2], "split": False}, seed=0)
    assert sorted(int(batch) for batch in own_data) == DATA[get_rank() :: 2]
    forced = build_dataloader({"dataset": DATA, "sampler": Says(), "split": True, "batch_size": 4}, seed=0)
    assert isinstance(forced.sampler, ShardedSampler)
    plain = build_dataloader({"dataset": DATA, "split": True}, seed=0)
    assert isinstance(plain.sampler, DefaultSampler)


@ranks(2)
def test_a_distributed_sampler_by_name_gets_its_share():
    cfg = {"dataset": DATA, "sampler": {"type": "DistributedSampler", "shuffle": False}}
    parts = all_gather_object([int(batch) for batch in build_dataloader(cfg, seed=0)])
    assert parts == [DATA[::2], DATA[1::2]]
    parts = all_gather_object([int(batch) for batch in build_dataloader(cfg, seed=0, shard=(0, 1))])
    assert parts == [DATA, DATA]


@ranks(2)
def test_ranks_that_share_their_samples_draw_the_same():
    torch.manual_seed(get_rank())
    loader = build_dataloader(DataLoader(DATA, sampler=Own(), batch_size=2), seed=4, shard=(0, 1))
    first, second = all_gather_object(seen(loader, 6))
    assert first == second
    assert len(first) == 6
