"""From a config, or a user's own `DataLoader`, to this rank's share."""

from __future__ import annotations

import logging
import re
from collections import namedtuple
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    random_split,
)
from torch.utils.data.distributed import DistributedSampler

from lockstep.dataset import DefaultSampler, InfiniteSampler, build_dataloader, pseudo_collate, set_epoch
from lockstep.dataset.position import begun_at, global_order_of
from lockstep.dist import all_gather_object, get_rank, get_world_size
from lockstep.errors import ConfigError
from lockstep.registry import DATASETS, FUNCTIONS
from lockstep.testing import ranks

Pair = namedtuple("Pair", "image label")


@DATASETS.register_module(name="CountingForTests")
class Counting(Dataset[int]):
    def __init__(self, length: int = 11) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


class IteratedDataset(list[int]):
    """A data set that, as HuggingFace's, can be iterated over: by samples, where a loader has batches."""

    def __getitems__(self, indices: list[int]) -> list[int]:
        return [self[index] for index in indices]


class Endless(IterableDataset[int]):
    def __iter__(self):
        return iter(range(6))


def seen(loader) -> list[int]:
    return [int(value) for batch in loader for value in torch.as_tensor(batch).flatten()]


def everybody_saw(loader) -> list[list[int]]:
    return all_gather_object(seen(loader))


@ranks(1, 2, 4)
@pytest.mark.parametrize("dataset", [{"type": "CountingForTests"}, {"type": Counting}, Counting()])
def test_a_config_deals_the_data_out(dataset):
    train = build_dataloader({"dataset": dataset, "batch_size": 3}, seed=0)
    parts = everybody_saw(train)
    assert len({len(part) for part in parts}) == 1
    assert {i for part in parts for i in part} == set(range(11))
    assert parts[0] != sorted(parts[0])

    val = build_dataloader({"dataset": dataset, "batch_size": 3}, seed=0, evaluation=True)
    parts = everybody_saw(val)
    assert sorted(i for part in parts for i in part) == list(range(11))
    assert parts[get_rank()] == list(range(11))[get_rank() :: len(parts)]


@ranks(2)
@pytest.mark.parametrize("evaluation", [True, False])
def test_a_loader_that_knows_no_ranks_is_dealt_out_anew(evaluation):
    collate = pseudo_collate
    given = DataLoader(Counting(), batch_size=4, shuffle=True, drop_last=False, collate_fn=collate)
    loader = build_dataloader(given, seed=5, evaluation=evaluation)
    assert isinstance(loader.sampler, DefaultSampler)
    assert loader.sampler.shuffle
    assert loader.sampler.round_up is not evaluation
    assert (loader.batch_size, loader.collate_fn) == (4, collate)
    parts = everybody_saw(loader)
    assert {i for part in parts for i in part} == set(range(11))
    assert sum(map(len, parts)) == (11 if evaluation else 12)

    ordered = build_dataloader(DataLoader(Counting(), batch_size=4), seed=5, evaluation=evaluation)
    assert seen(ordered)[:5] == list(range(11))[get_rank() :: 2][:5]


@contextmanager
def logged() -> Iterator[list[str]]:
    """Give the list of what is logged inside, each with its level."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(f"{record.levelname}: {record.getMessage()}")
    logger = logging.getLogger("lockstep.dataset")
    logger.addHandler(handler)
    logger.setLevel("INFO")
    try:
        yield messages
    finally:
        logger.removeHandler(handler)
        logger.setLevel("NOTSET")


class Prefetcher:
    """Wraps a loader, as those do that copy batches to a device ahead."""

    def __init__(self, loader: DataLoader[int]) -> None:
        self.loader = loader
        self.dataset = loader.dataset
        self.sampler = loader.sampler

    def __iter__(self) -> Iterator[Any]:
        return iter(self.loader)


class EagerLoader(DataLoader[int]):
    """Starts its workers before the training, as loaders do that live on from epoch to epoch."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.iterator = super().__iter__()


class ShardedStream(Endless):
    def __init__(self) -> None:
        self._rank = get_rank()

    def __iter__(self):
        return iter(range(self._rank, 6, 2))


def distributed() -> DataLoader[int]:
    return DataLoader(Counting(), sampler=DistributedSampler(Counting()))


def own_and_told() -> DataLoader[Any]:
    loader = DataLoader(TensorDataset(torch.arange(8)[get_rank() :: 2]))
    loader.rank = get_rank()  # type: ignore[attr-defined]
    return loader


LEFT_ALONE = {
    "distributed": (distributed, "INFO: DataLoader of Counting is left as it is: it knows of ranks"),
    "wrapped distributed": (lambda: Prefetcher(distributed()), "INFO: Prefetcher of Counting.* knows of ranks"),
    "rank": (own_and_told, "INFO: DataLoader of TensorDataset.* knows of ranks"),
    "sharded stream": (lambda: DataLoader(ShardedStream()), "INFO: DataLoader of ShardedStream.* knows of ranks"),
    "stream": (
        lambda: DataLoader(Endless()),
        r"WARNING: DataLoader of Endless .* each of the 2 ranks .* all that it yields.* config dict\(dataset=",
    ),
    "wrapped": (
        lambda: Prefetcher(DataLoader(Counting())),
        r"WARNING: Prefetcher of Counting .* the same on every rank unless it shards by itself\. Give a D",
    ),
    "equal batches": (lambda: [torch.ones(2)], r"INFO: list is left as it is: each of the 2 ranks .* `rank`"),
    "own batches": (lambda: [torch.ones(2) * get_rank()], "INFO: list is left as it is: it holds other data on each"),
    "eager": (lambda: EagerLoader(Counting()), "WARNING: .* has begun to read before the training"),
}


@ranks(2)
@pytest.mark.parametrize("kind", LEFT_ALONE)
def test_what_is_left_as_it_is_is_told(kind):
    make, says = LEFT_ALONE[kind]
    with logged() as messages:
        given = make()
        assert build_dataloader(given, seed=0) is given
    (message,) = messages
    assert re.match(says, message), message
    if "each of the 2 ranks" in says:  # an evaluation does not compare the ranks' batches
        with logged() as messages:
            build_dataloader(given, seed=0, evaluation=True)
        assert re.match(says.replace("INFO", "WARNING"), messages[0]), messages


def split_by_chance(rank: int) -> tuple[Any, Any]:
    return random_split(Counting(), [8, 3], generator=torch.Generator().manual_seed(rank))  # type: ignore[return-value]


def half(kind: Any) -> Any:
    size = 10**9 if kind is range else 10**5
    return DataLoader(Subset(range(2 * size), kind(get_rank() * size, (get_rank() + 1) * size)), shuffle=True)


OF_EACH_RANK: dict[str, tuple[Callable[[], Any], str]] = {
    "split": (lambda: DataLoader(split_by_chance(get_rank())[0], shuffle=True), "the indices of the Subset"),
    "sampler": (
        lambda: DataLoader(Counting(), sampler=SubsetRandomSampler(split_by_chance(get_rank())[0].indices)),
        "SubsetRandomSampler.indices",
    ),
    "config": (lambda: {"dataset": split_by_chance(get_rank())[0]}, "the indices of the Subset"),
    "rows": (
        lambda: DataLoader(TensorDataset(torch.arange(8)[get_rank() :: 2])), "the first and last items of the TensorD"
    ),
    "array": (lambda: DataLoader(np.arange(8)[get_rank() :: 2]), "the first and last items of the ndarray"),  # type: ignore[arg-type]
    "range": (lambda: half(range), "the indices of the Subset"),
    "tensor": (lambda: half(torch.arange), "the indices of the Subset"),
}  # fmt: skip


@ranks(2)
@pytest.mark.parametrize("kind", OF_EACH_RANK)
def test_data_of_each_ranks_own_have_to_be_spoken_for(kind):
    make, name = OF_EACH_RANK[kind]
    says = rf"{name}.* differ \(rank \d of 2\)\. .*give a random split a seed.*say (so by an attribute `rank`|`split=F)"
    for evaluation in (False, True):
        with pytest.raises(ConfigError, match=says):
            build_dataloader(make(), seed=0, evaluation=evaluation)


@ranks(2)
def test_a_random_split_that_is_the_same_on_all_ranks_is_split():
    train, val = split_by_chance(3)
    seen = [int(one) for one in build_dataloader(DataLoader(val), seed=0, evaluation=True)]
    assert sorted(one for part in all_gather_object(seen) for one in part) == sorted(val.indices)
    assert len(build_dataloader(DataLoader(train), seed=0)) == 4


HOLDING_OBJECTS: dict[str, Callable[[], Any]] = {
    "tuple": lambda: (3, object()),
    "array": lambda: np.array([object()]),
    "dict": lambda: {"x": [1, object()]},
}


@ranks(2)
@pytest.mark.parametrize("kind", HOLDING_OBJECTS)
def test_samples_that_hold_objects_are_not_compared_by_their_addresses(kind):
    samples = [HOLDING_OBJECTS[kind]() for _ in range(8 + get_rank())]  # so that addresses differ
    assert len(build_dataloader(DataLoader(samples[get_rank() :], collate_fn=list), seed=0)) == 4


STRIDED: dict[str, Callable[[], torch.Tensor]] = {
    "column": lambda: torch.arange(48.0).view(8, 3, 2)[..., 1],
    "fortran": lambda: torch.from_numpy(np.asfortranarray(np.arange(24).reshape(8, 3))),  # as `.values` of pandas
    "conjugate": lambda: torch.arange(24).view(8, 3).to(torch.complex64).conj(),
    "sparse": lambda: torch.eye(8).to_sparse(),
}


@ranks(2)
@pytest.mark.parametrize("kind", STRIDED)
def test_samples_whose_elements_are_apart_in_memory_are_compared(kind):
    data = STRIDED[kind]()
    assert len(build_dataloader(DataLoader(TensorDataset(data)), seed=0)) == 4
    if kind != "sparse":
        with pytest.raises(ConfigError, match="the first and last items of the TensorDataset"):
            build_dataloader(DataLoader(TensorDataset(data + get_rank())), seed=0)
        with pytest.raises(ConfigError, match="the first and last items of the TensorDataset"):
            build_dataloader(DataLoader(TensorDataset(data.roll(get_rank(), 0))), seed=0)


@ranks(2)
def test_what_is_dealt_out_is_told():
    with logged() as messages:
        build_dataloader(DataLoader(Counting(), sampler=WeightedRandomSampler([1.0] * 11, 5)), seed=0)
    (message,) = messages
    assert message == (
        "INFO: DataLoader of Counting: 5 samples, 3 on each of 2 ranks, 1 repeated, in the order of "
        "WeightedRandomSampler, of which each takes its share (if it shards by itself, an attribute `rank` says so)"
    )


@ranks(2)
@pytest.mark.parametrize(("evaluation", "says"), [(True, ", of which drop_last leaves out 5"), (False, ", 1 repeated")])
def test_samples_that_an_evaluation_leaves_out_are_told(evaluation, says):
    with logged() as messages:
        build_dataloader(DataLoader([*range(21)], batch_size=4, drop_last=True), seed=0, evaluation=evaluation)
    (message,) = messages
    assert message.endswith(f"on each of 2 ranks{says}")


class Subclass(DataLoader[int]):
    """Takes other arguments than its base class, as those of graph libraries do."""

    def __init__(self, data: Dataset[int], follow: list[str]) -> None:
        self.follow = follow
        workers = {"num_workers": 1, "persistent_workers": True, "multiprocessing_context": "fork"}
        super().__init__(data, batch_size=3, shuffle=True, collate_fn=list, **workers)


@ranks(1, 2)
def test_a_subclass_that_collates_otherwise_draws_the_same_order_on_any_number_of_ranks():
    given = Subclass(Counting(), ["x"])
    list(given)
    loader = build_dataloader(given, seed=0)
    assert (type(loader), loader.follow, loader.num_workers) == (Subclass, ["x"], 1)
    assert [len(batch) for batch in loader][:2] == [3, 3]
    passes = [[number for batch in loader for number in batch] for _ in range(2)]
    assert passes[0] == passes[1]
    drawn = [number for at_once in zip(*all_gather_object(passes[0]), strict=True) for number in at_once]
    assert drawn[:11] == list(DefaultSampler(range(11), seed=0, shard=(0, 1)))
    list(given)  # which is as it was


class OwnOrder(DataLoader[int]):
    """Goes through its data in its own way."""

    def __iter__(self):
        return iter([[0], [1]])


def test_in_one_process_a_loader_that_draws_in_its_own_way_is_left_as_it_is():
    given = OwnOrder(Counting())
    assert build_dataloader(given, seed=0) is given


def test_on_one_process_an_order_is_drawn_by_seed_and_epoch_too():
    loader = build_dataloader(DataLoader(Counting(), shuffle=True), seed=0)
    assert seen(loader) == seen(build_dataloader({"dataset": Counting()}, seed=0))
    given = DataLoader(Counting())
    assert build_dataloader(given, seed=0, evaluation=True) is given


@ranks(2)
def test_samplers_of_a_config():
    data = Counting()
    torchs = build_dataloader({"dataset": data, "sampler": {"type": "SequentialSampler"}}, seed=0)
    assert seen(torchs) == [0, 2, 4, 6, 8, 10] if get_rank() == 0 else [1, 3, 5, 7, 9, 0]
    default = build_dataloader(
        {"dataset": data, "sampler": {"type": "DefaultSampler", "shuffle": False}}, seed=0, evaluation=True
    )
    assert sum(map(len, everybody_saw(default))) == 11
    padded = build_dataloader(
        {"dataset": data, "sampler": {"type": DefaultSampler, "round_up": True}}, seed=0, evaluation=True
    )
    assert sum(map(len, everybody_saw(padded))) == 12
    own = build_dataloader({"dataset": data, "sampler": [1, 2]}, seed=0)
    assert seen(own) == [1 + get_rank()]
    batches = build_dataloader(
        {"dataset": data, "batch_size": 2, "batch_sampler": {"type": BatchSampler, "drop_last": True}}, seed=0
    )
    assert isinstance(batches.batch_sampler.sampler, DefaultSampler)
    assert [len(batch) for batch in batches] == [2, 2, 2]
    shuffled = build_dataloader({"dataset": data, "shuffle": True}, seed=0, evaluation=True)
    assert shuffled.sampler.shuffle


def every_other(dataset: Any, rank: int, world_size: int) -> list[int]:
    """Make the sampler of a rank's part, as a function that a config may name."""
    return list(range(len(dataset)))[rank::world_size]


@ranks(2)
def test_a_function_may_make_the_sampler_and_batches_are_torchs_by_default():
    cfg = {"dataset": Counting(), "sampler": {"type": every_other}, "split": False}
    assert seen(build_dataloader(cfg, seed=0)) == list(range(11))[get_rank() :: 2]
    batches = {"batch_size": 3, "drop_last": True}
    loader = build_dataloader({"dataset": Counting(), "batch_sampler": batches}, seed=0)
    assert [len(batch) for batch in loader] == [3, 3]


@ranks(2)
def test_a_loader_around_another_is_left_as_it_is_in_an_evaluation_too():
    given = Prefetcher(distributed())
    with logged() as messages:
        assert build_dataloader(given, seed=0, evaluation=True) is given
    assert "it knows of ranks" in messages[0]


@ranks(2)
def test_workers_draw_other_numbers_on_every_rank_and_the_same_in_every_run():
    def state(seed: int, epoch: int = 0) -> int:
        loader = build_dataloader({"dataset": Counting()}, seed=seed)
        set_epoch(loader, epoch)
        return loader.generator.initial_seed()

    first, second = all_gather_object(state(3))
    assert first != second
    assert state(3) == state(3)
    assert len({state(3, 0), state(3, 1), state(4, 1), state(3, 2)}) == 4
    assert state(3, 7) == state(3, 7)
    assert build_dataloader({"dataset": Counting(), "generator": None}, seed=0).generator is None  # torch's global one


@pytest.mark.parametrize(
    ("name", "batch"),
    [("default_collate", torch.tensor([0, 1])), ({"type": "pseudo_collate"}, [0, 1]), (None, torch.tensor([0, 1]))],
)
def test_samples_become_batches_as_one_asks(name, batch):
    cfg = {"dataset": Counting(2), "batch_size": 2, "shuffle": False, "collate_fn": name}
    (got,) = build_dataloader(cfg, seed=0)
    assert type(got) is type(batch)
    assert list(got) == list(batch)


def test_pseudo_collate_stacks_nothing():
    sample = {"pair": Pair("a", [1, (2,)])}
    assert pseudo_collate([sample, sample]) == {"pair": Pair(["a", "a"], [[1, 1], ([2, 2],)])}


@pytest.mark.parametrize(
    ("cfg", "error", "says"),
    [
        ({"batch_size": 2}, ConfigError, "key `dataset`, but has only .*batch_size"),
        ({"dataset": Counting(), "batch_sise": 2}, ConfigError, "unknown key 'batch_sise': did you mean `batch_size`"),
        ({"dataset": Counting(), "shuffle": True, "sampler": {}}, ConfigError, "both 'sampler' and 'shuffle'"),
        ({"dataset": Counting(), "collate_fn": "stack"}, ConfigError, "`default_collate`, `pseudo_collate`"),
        (
            {"dataset": Endless(), "shuffle": True, "num_batch_per_epoch": 3},
            ConfigError,
            "h` and `shuffle` can't be given",
        ),
        (3, TypeError, "DataLoader, an iterable of batches or a config dict, but is 3"),
        (Subset([1, 2], [0]), TypeError, r"but is .* of type Subset. Wrap the dataset: DataLoader\(dataset,"),
        (IteratedDataset(), TypeError, r"of type IteratedDataset. Wrap .*, or dict\(dataset=..., batch_size=...\)$"),
    ],
)
def test_wrong_configs_are_refused(cfg, error, says):
    with pytest.raises(error, match=says):
        build_dataloader(cfg, seed=0)


def test_epochs_reach_the_sampler_wherever_it_is():
    loader = build_dataloader({"dataset": Counting()}, seed=0)
    set_epoch(loader, 4)
    assert loader.sampler.epoch == 4
    sampler = DefaultSampler(range(11), seed=0)
    set_epoch(DataLoader(Counting(), batch_sampler=BatchSampler(sampler, 2, False)), 3)
    assert sampler.epoch == 3
    set_epoch(DataLoader(TensorDataset(torch.ones(1))), 2)  # nobody wants to know


def test_batches_are_skipped_without_reading_them_where_the_sampler_can():
    loader = build_dataloader({"dataset": Counting(), "batch_size": 2}, seed=0)
    whole = seen(loader)
    assert seen(begun_at(loader, 4)) == whole[4:]
    assert global_order_of(DataLoader(Counting())) is None


@FUNCTIONS.register_module()
def collate_sum(batch: list[int], plus: int = 0) -> int:
    return sum(batch) + plus


@FUNCTIONS.register_module()
class CollateMax:
    def __init__(self, least: int) -> None:
        self.least = least

    def __call__(self, batch: list[int]) -> int:
        return max(self.least, *batch)


@pytest.mark.parametrize(
    ("collate_fn", "expected"),
    [
        ("collate_sum", [1, 5]),
        ({"type": "collate_sum", "plus": 10}, [11, 15]),
        ({"type": "CollateMax", "least": 2}, [2, 3]),
    ],
)
def test_what_collates_may_be_registered(collate_fn, expected):
    cfg = {"dataset": list(range(4)), "batch_size": 2, "shuffle": False, "collate_fn": collate_fn}
    assert list(build_dataloader(cfg, seed=0)) == expected


@ranks(1, 2)
def test_an_epoch_may_be_cut_short_for_a_trial():
    cfg = {"dataset": Counting(), "batch_size": 2, "num_batch_per_epoch": 2, "sampler": {"shuffle": False}}
    batches = list(build_dataloader(cfg, seed=0))
    assert [len(batch) for batch in batches] == [2, 2]
    seen = sorted(int(value) for part in all_gather_object(torch.cat(batches)) for value in part)
    assert seen == list(range(4 * get_world_size()))
    in_its_own = {"type": "BatchSampler", "batch_size": 4, "drop_last": False}
    for more, size in ({"batch_size": 1, "batch_sampler": in_its_own}, 4), ({"batch_size": None}, 1):
        long = {**cfg, "dataset": range(40), **more}
        assert [torch.as_tensor(one).numel() for one in build_dataloader(long, seed=0)] == [size, size]
    for wrong in (0, 1.5):
        with pytest.raises(ConfigError, match="`num_batch_per_epoch` must be an int of at least 1, but is "):
            build_dataloader({**cfg, "num_batch_per_epoch": wrong}, seed=0)
    with pytest.raises(ConfigError, match="`sampler`, a RandomSampler, draws from all"):
        build_dataloader({**cfg, "sampler": RandomSampler(Counting())}, seed=0)


@ranks(1, 2, 3)
def test_a_global_batch_has_its_size_on_any_number_of_ranks():
    cfg = {"dataset": list(range(18)), "global_batch_size": 6}
    loader = build_dataloader(cfg, seed=0)
    batches = [sorted(int(i) for part in all_gather_object(batch) for i in part) for batch in loader]
    assert loader.batch_size == 6 // get_world_size()
    assert batches == [sorted(map(int, batch)) for batch in build_dataloader(cfg, seed=0, shard=(0, 1))]


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"batch_size": 2}, "`global_batch_size` and `batch_size` both set the size of batches"),
        ({"global_batch_size": 0}, "`global_batch_size` must be an int of at least 1, but is 0"),
        ({"global_batch_size": 16}, "a multiple of the number of ranks that share the data, 3, but is 16"),
    ],
)
def test_a_global_batch_that_can_not_be_shared_is_refused(more, says):
    with pytest.raises(ConfigError, match=re.escape(says)):
        build_dataloader({"dataset": list(range(18)), "global_batch_size": 6, **more}, seed=0, shard=(0, 3))


class Lazy(Counting):
    def full_init(self) -> None:
        self.is_full = True


def test_a_data_set_does_what_it_has_put_off():
    assert build_dataloader({"dataset": {"type": Lazy}}, seed=0).dataset.is_full


@pytest.mark.parametrize("given_as", ["sampler", "config", "batch sampler"])
@ranks(2)
def test_a_distributed_sampler_repeats_nothing_in_evaluation(given_as: str) -> None:
    dataset = TensorDataset(torch.arange(5))
    sampler = DistributedSampler(dataset, shuffle=False)
    given: Any = {"dataset": dataset, "batch_size": 2, "sampler": sampler}
    if given_as == "batch sampler":
        given = DataLoader(dataset, batch_sampler=BatchSampler(sampler, 2, drop_last=False))
    elif given_as == "sampler":
        given = DataLoader(**given)
    loader = build_dataloader(given, seed=0, evaluation=True)
    seen = [int(x) for (batch,) in loader for x in batch]
    assert sorted(x for one in all_gather_object(seen) for x in one) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("given_as", ["sampler", "batch sampler"])
@pytest.mark.parametrize(("replicas", "ranks_given"), [(2, [0, 0]), (4, [0, 1]), (1, [0, 0])])
@ranks(2)
def test_a_distributed_sampler_must_split_the_data_over_all_ranks(replicas, ranks_given, given_as):
    data = TensorDataset(torch.arange(8))
    sampler = DistributedSampler(data, replicas, ranks_given[get_rank()])
    how = {"sampler": sampler, "batch_size": 2}
    if given_as == "batch sampler":
        how = {"batch_sampler": BatchSampler(sampler, 2, drop_last=False)}
    has = f"DistributedSampler has rank=0, num_replicas={replicas} on rank 0, rank={ranks_given[1]}, .* on rank 1"
    with pytest.raises(ConfigError, match=has):
        build_dataloader(DataLoader(data, **how), seed=0)
    meant = DataLoader(data, **how)
    meant.rank = get_rank()
    build_dataloader(meant, seed=0)
    of_its_own = TensorDataset(torch.arange(8) + get_rank())  # as where each node holds a part of the data
    build_dataloader(DataLoader(of_its_own, **how), seed=0)


@pytest.mark.parametrize("kind", [DefaultSampler, InfiniteSampler, DistributedSampler])
@ranks(2)
def test_samplers_that_split_one_order_must_have_one_seed(kind: Any):
    data = TensorDataset(torch.arange(8))
    seeded = partial(kind, num_replicas=2, rank=get_rank()) if kind is DistributedSampler else kind
    message = rf"^`seed` of {kind.__name__} must be the same on all ranks, .* 0 on rank 0, 1 on rank 1\. Give all ranks"
    with pytest.raises(ConfigError, match=message):
        build_dataloader(DataLoader(data, sampler=seeded(data, shuffle=True, seed=get_rank())), seed=0)
    if kind is not DistributedSampler:
        with pytest.raises(ConfigError, match=message):
            build_dataloader({"dataset": data, "sampler": {"type": kind, "seed": get_rank()}}, seed=0)
    build_dataloader(DataLoader(data, sampler=seeded(data, shuffle=True, seed=3)), seed=0)
