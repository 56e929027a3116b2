"""Streams that split themselves, or differ between ranks or workers: each sample is seen once, or there is an error."""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from lockstep.dataset import build_dataloader, set_epoch
from lockstep.dist import all_gather_object, get_rank, get_world_size, is_main_process
from lockstep.errors import ConfigError
from lockstep.runner import Runner
from lockstep.runner.uneven_inputs import EvenBatches
from lockstep.testing import ranks

NUMBERS = list(range(16))


class Stream(IterableDataset[int]):
    """Yields what it is given, through its stages."""

    def __init__(self, items: Any = NUMBERS, *stages: Callable[[Any], Any]) -> None:
        self.items, self.stages = items, list(stages)

    def __iter__(self) -> Iterator[int]:
        items = iter(self.items)
        for stage in self.stages:
            items = stage(items)
        return iter(items)


class ByCall(Stream):
    def __iter__(self) -> Iterator[int]:
        return iter(NUMBERS[torch.distributed.get_rank() :: 2])


def own_part(items: Any) -> Any:
    return list(items)[get_rank() :: get_world_size()]


KNOWING: dict[str, Callable[[], Any]] = {
    "call": ByCall,
    "stage": lambda: Stream(NUMBERS, own_part),
    "data": lambda: Stream(NUMBERS[get_rank() :: 2]),
    "floats": lambda: Stream(torch.tensor(NUMBERS[get_rank() :: 2]) / 2),
}


@ranks(2)
@pytest.mark.parametrize("kind", KNOWING)
def test_a_stream_that_splits_itself_over_ranks_has_to_be_spoken_for(kind):
    with pytest.raises(ConfigError, match=r"must yield the same.*rank 0 and rank 1 \(rank \d of 2.*`split=False`"):
        seen(KNOWING[kind](), workers=0)
    loader = build_dataloader({"dataset": KNOWING[kind](), "split": False}, seed=0)
    parts = all_gather_object([float(one) for one in loader])
    assert len({number for part in parts for number in part}) == len(NUMBERS)


class Speaking(Stream):
    """Asks for nothing that decides what it yields."""

    def __init__(self) -> None:
        super().__init__()
        self.seed = get_rank() * 0
        self.model = nn.Linear(1, 1)

    def unused(self) -> Any:
        return own_part(NUMBERS)

    def __iter__(self) -> Iterator[int]:
        if is_main_process():
            random.random()
        return super().__iter__()


class Rewound(Stream):
    """Is its own iterator, and begins anew whenever it is asked for one."""

    def __iter__(self) -> Iterator[int]:
        self.rest = list(NUMBERS)
        return self

    def __next__(self) -> int:
        if not self.rest:
            raise StopIteration
        return self.rest.pop(0)


@ranks(2)
def test_other_streams_are_split():
    for dataset in (
        Stream(),
        Rewound(),
        Speaking(),
        Stream(NUMBERS, list),
        Stream(DataLoader(NUMBERS, batch_size=None)),
    ):
        parts = all_gather_object([int(one) for one in build_dataloader({"dataset": dataset}, seed=0)])
        assert parts == [NUMBERS[0::2], NUMBERS[1::2]]


def own_of_worker(items: Any) -> Any:
    info = get_worker_info()
    return items if info is None else list(items)[info.id :: info.num_workers]


class SeededByWorker(Stream):
    """Has another order in each worker, of all samples."""

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        return iter(random.Random(info.id if info else 0).sample(NUMBERS, len(NUMBERS)))


class Shuffling(Stream):
    """Shuffles by generators that it has not seeded."""

    def __iter__(self) -> Iterator[int]:
        order = [NUMBERS[index] for index in torch.randperm(len(NUMBERS))]
        random.shuffle(order)
        return iter(np.random.permutation(order).tolist())


def seen(dataset: Any, workers: int, epochs: int = 2, **options: Any) -> list[list[int]]:
    """Return what this rank sees in each epoch."""
    context = {"num_workers": workers, "multiprocessing_context": "fork"} if workers else {}
    loader = build_dataloader({"dataset": dataset, "batch_size": 2, **context, **options}, seed=3)
    random.seed(get_rank())
    torch.manual_seed(get_rank())
    np.random.seed(get_rank())
    own = []
    for epoch in range(epochs):
        set_epoch(loader, epoch)
        own.append([int(one) for batch in EvenBatches(loader).iterate() if batch.is_own for one in batch.data])
    return own


@ranks(1, 2)
@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_may_shuffle_by_the_global_generators(workers):
    parts = all_gather_object(seen(Shuffling(), workers))
    for epoch in range(2):
        assert sorted(one for part in parts for one in part[epoch]) == NUMBERS
    assert parts[0][0] != parts[0][1]
    assert torch.rand(1) == torch.rand(1, generator=torch.Generator().manual_seed(get_rank()))


class Private(Stream):
    """Shuffles by a generator of each process's own, and begins with another item in each."""

    def __iter__(self) -> Iterator[int]:
        worker = get_worker_info()
        first = 4 * get_rank() + (0 if worker is None else worker.id)
        rest = [number for number in NUMBERS if number != first]
        return iter([first, *random.Random(os.urandom(8)).sample(rest, 15)])


@ranks(2)
def test_an_order_of_each_ranks_own_is_an_error_on_every_rank():
    with pytest.raises(ConfigError, match=r"Private must yield the same samples.*differ between rank 0 and rank 1"):
        seen(Private(), workers=0)
    with pytest.raises(ConfigError, match=r"ByCall must yield the same samples.*differ between rank 0 and rank 1"):
        seen(ByCall(), workers=0, split="ranks")


@ranks(1, 2)
def test_an_order_of_each_workers_own_is_an_error():
    with pytest.raises((ConfigError, RuntimeError), match=r"differ between"):
        seen(Private(), workers=2)


class Evaluated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(1, 1)

    def forward(self, batch: Any, mode: str = "tensor") -> Any:
        return self.linear(batch.float()[:, None])


@ranks(2)
def test_an_order_of_each_ranks_own_is_found_in_a_validation(tmp_path):
    def loss(outputs: Any, batch: Any) -> Any:
        return outputs.square().mean()

    runner = Runner(
        Evaluated(), tmp_path, loss=loss, val_dataloader={"dataset": Private(), "batch_size": 4}, log_level="ERROR"
    )
    with pytest.raises(ConfigError, match="differ between rank 0 and rank 1"):
        runner.val()


class Numbered(Shuffling):
    """Draws a random number beside each sample; it can say where it is, if asked to."""

    def __iter__(self) -> Iterator[Any]:
        return ((one, torch.rand(())) for one in super().__iter__())


class Placed(Numbered):
    def __init__(self) -> None:
        super().__init__()
        self.next = 0

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]

    def __iter__(self) -> Iterator[Any]:
        while self.next < 16:
            self.next += 1
            yield self.next - 1, torch.rand(())


@ranks(1, 2)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", [Numbered, Placed])
def test_what_a_stream_draws_goes_on_after_a_resume(kind, workers):
    def passes() -> EvenBatches:
        context = {"num_workers": workers, "multiprocessing_context": "fork"} if workers else {}
        return EvenBatches(build_dataloader({"dataset": kind(), "batch_size": 2, **context}, seed=3))

    def texts(batches: Any) -> list[str]:
        return [str(batch.data) for batch in batches]

    first = passes()
    batches = first.iterate()
    begun = [next(batches) for _ in range(2)]
    position, states = first.position(0, 2), all_gather_object(first.state())
    rest = texts(batches)
    again = passes()
    begin = again.read_position(position, states[get_rank()], states)
    torch.manual_seed(99)
    assert texts(again.iterate(begin)) == rest
    assert len(begun) + len(rest) == 16 // 2 // get_world_size()


class Told(Stream):
    """Splits itself over its workers, and says where it is."""

    def __init__(self) -> None:
        super().__init__()
        self.done = 0

    def state_dict(self) -> dict[str, int]:
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.done = state["done"]

    def __iter__(self) -> Iterator[int]:
        for number in own_of_worker(NUMBERS)[self.done :]:
            self.done += 1
            yield number


@ranks(1, 2)
@pytest.mark.parametrize("split", ["ranks", False])
def test_a_stream_whose_workers_split_it_goes_on_where_each_of_them_was(split):
    def passes() -> EvenBatches:
        cfg = {"dataset": Told(), "split": split, "num_workers": 2, "multiprocessing_context": "fork", "batch_size": 2}
        return EvenBatches(build_dataloader(cfg, seed=3))

    def numbers(batches: Any) -> list[int]:
        return [one for batch in batches if batch.is_own for one in batch.data.tolist()]

    first = passes()
    batches = first.iterate()
    begun = numbers([next(batches)])  # the next one is the second worker's turn
    position, states = first.position(0, 1), all_gather_object(first.state())
    again = passes()
    rest = numbers(again.iterate(again.read_position(position, states[get_rank()], states)))
    seen_by_all = sorted(one for part in all_gather_object(begun + rest) for one in part)
    assert seen_by_all == sorted(NUMBERS * (1 if split else get_world_size()))


class WithArguments(Told):
    """Has a `state_dict` for a loader of its own package."""

    def state_dict(self, samples: int) -> dict[str, int]:  # type: ignore[override]
        return {"done": samples}


def test_a_state_that_needs_arguments_is_left_to_who_has_them():
    assert [int(one) for one in build_dataloader({"dataset": WithArguments()}, seed=0)] == NUMBERS


class Said(logging.Handler):
    """Keeps what lockstep says on this rank, while it is entered."""

    def __enter__(self) -> list[str]:
        self.lines: list[str] = []
        logging.getLogger("lockstep").addHandler(self)
        return self.lines

    def __exit__(self, *_: object) -> None:
        logging.getLogger("lockstep").removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


class Lines(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(1, 1)

    def forward(self, batch: Any, mode: str = "loss") -> Any:
        return self.linear(batch.float()[:, None]).mean()


@ranks(2)
@pytest.mark.parametrize("is_split", [True, False])
def test_ranks_that_train_on_the_same_samples_of_an_unsplit_stream_are_named(is_split, tmp_path):
    cfg = {"dataset": ByCall() if is_split else Stream(), "split": False, "batch_size": 4}
    runner = Runner(
        Lines(), tmp_path, train_dataloader=cfg, train_cfg={"by_epoch": False, "max_iters": 2},
        optim_wrapper={"optimizer": {"type": "SGD", "lr": 0.1}}, default_hooks={"checkpoint": None},
    )  # fmt: skip
    says = "ranks 0, 1 have got the same first batch from Stream .*split='ranks'"
    with nullcontext() if is_split else pytest.raises(ConfigError, match=says):
        runner.train()


@ranks(2)
def test_ranks_that_are_to_share_their_samples_say_so_by_an_attribute():
    dataset = Stream()
    dataset.rank = get_rank()
    assert len(list(EvenBatches(DataLoader(dataset, batch_size=4), shards=2).iterate())) == 4
    with Said() as lines:
        assert len(list(EvenBatches([torch.arange(2)], shards=2).iterate())) == 1
    assert "ranks 0, 1 have got the same first batch from list" in "".join(lines)


@pytest.mark.parametrize("split", [None, "ranks", False])
def test_workers_that_all_yield_the_same_are_an_error(split):
    options = {"num_workers": 2, "batch_size": 4, "multiprocessing_context": "fork"}
    given = DataLoader(Stream(), **options) if split is None else {"dataset": Stream(), "split": split, **options}
    with pytest.raises(ConfigError, match="two workers have made the same batch from Stream"):
        list(EvenBatches(build_dataloader(given, seed=0), shards=1).iterate())
