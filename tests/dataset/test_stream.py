"""Iterable data over ranks and workers: each sample once, one order, a position that is kept."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset, get_worker_info

from lockstep.dataset import build_dataloader, length_of, set_epoch
from lockstep.dataset.position import check_alike, loader_state, restore_loader_state
from lockstep.dist import all_gather_object, get_rank
from lockstep.errors import ConfigError
from lockstep.testing import ranks, run_ranks


class Numbers(IterableDataset[int]):
    """Shuffles by its epoch, and can say where it is."""

    def __init__(self, length: int = 23) -> None:
        self.length, self.epoch, self.next, self.made = length, 0, 0, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(self.length, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        while self.next < self.length:
            self.next += 1
            self.made += 1
            yield order[self.next - 1]


class Plain(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(23))


class Parted(Numbers):
    def __init__(self, length: int = 23, part: int = 0, parts: int = 1) -> None:
        super().__init__(length)
        self.part, self.parts = part, parts

    def split_over(self, part: int, parts: int) -> Parted:
        made = Parted(self.length, part, parts)
        made.set_epoch(self.epoch)
        return made

    def __iter__(self) -> Iterator[int]:
        return (number for number in super().__iter__() if number % self.parts == self.part)


class Asking(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        return iter(range(23) if info is None else range(info.id, 23, info.num_workers))


class Graphs(IterableDataset[Any]):
    """Samples of which the first ones can't be compared by all their values."""

    def __iter__(self) -> Iterator[Any]:
        ragged = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged)
        for number in range(8):
            yield {"number": float(number), "neighbours": torch.eye(3).mul(number).to_sparse(), "ragged": ragged}


def loader(dataset: Any, workers: int = 0, batch_size: int | None = 2, **more: Any) -> Any:
    # Forked: starting workers otherwise takes seconds each.
    context = {"multiprocessing_context": "fork"} if workers else {}
    return build_dataloader(
        {"dataset": dataset, "num_workers": workers, "batch_size": batch_size, **context, **more}, seed=0
    )


def seen(data: Any) -> list[list[int]]:
    return [torch.as_tensor(batch).reshape(-1).tolist() for batch in data]


def order_of(epoch: int) -> list[int]:
    return torch.randperm(23, generator=torch.Generator().manual_seed(epoch)).tolist()


def passes(dataset: Any, workers: int, batch_size: int, count: int, persistent: bool) -> list[list[list[int]]]:
    data = loader(dataset, workers, batch_size, persistent_workers=persistent)
    seen_by_pass = []
    for epoch in range(count):
        set_epoch(data, epoch)
        seen_by_pass.append(seen(data))
    return seen_by_pass


@pytest.mark.parametrize(("workers", "persistent"), [(0, False), (1, False), (2, False), (2, True)])
@pytest.mark.parametrize("size", [1, 2])
def test_the_order_depends_on_the_stream_alone(size, workers, persistent):
    batch_size = 4 // size
    by_rank = run_ranks(size, passes, Numbers(), workers, batch_size, 2, persistent)
    for epoch in range(2):
        order = order_of(epoch)
        for rank, epochs in enumerate(by_rank):
            own = order[rank::size]
            assert epochs[epoch] == [own[i : i + batch_size] for i in range(0, len(own), batch_size)]


class SharedEpoch(Numbers):
    """Has its epoch in memory that all workers share, and adds to it what is missing, as HuggingFace's streams do."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = torch.zeros((), dtype=torch.int64).share_memory_()

    def set_epoch(self, epoch: int) -> None:
        missing = epoch - int(self.shared)
        time.sleep(0.3)  # another worker may be here, too
        self.shared += missing

    def __iter__(self) -> Iterator[int]:
        self.epoch = int(self.shared)
        return super().__iter__()


@pytest.mark.parametrize("persistent", [False, True])
def test_workers_that_begin_at_once_set_the_epoch_that_they_share_once(persistent):
    by_epoch = passes(SharedEpoch(), 2, 4, 3, persistent)
    for epoch, batches in enumerate(by_epoch):
        assert [number for batch in batches for number in batch] == order_of(epoch)


@ranks(2)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", [Plain, Parted])
def test_every_sample_is_seen_once(kind, workers):
    parts = all_gather_object(seen(loader(kind(), workers)))
    numbers = [number for part in parts for batch in part for number in batch]
    assert sorted(numbers) == list(range(23))


@ranks(1, 2)
def test_a_data_set_that_splits_itself_over_its_workers_has_to_be_spoken_for():
    for split in (None, True):
        with pytest.raises(ConfigError, match=r"Asking must yield the same.*between its workers.*`split='ranks'`"):
            seen(loader(Asking(), workers=2, split=split))
    assert sum(map(len, seen(loader(Asking(), workers=2, split=False)))) == 23
    parts = all_gather_object(seen(loader(Asking(), workers=2, split="ranks")))
    assert sorted(number for part in parts for batch in part for number in batch) == list(range(23))


@ranks(1, 2)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", [Numbers, Parted])
@pytest.mark.parametrize("done", [1, 4])
def test_a_position_is_kept_exactly(kind, workers, done):
    def begun(epoch: int) -> Any:
        data = loader(kind(), workers)
        set_epoch(data, epoch)
        return data

    whole = begun(1)
    batches = iter(whole)
    first = [next(batches).tolist() for _ in range(done)]
    position = loader_state(whole)
    rest = [batch.tolist() for batch in batches]

    again = begun(1)
    assert restore_loader_state(again, position)
    assert seen(again) == rest
    if workers == 0:  # nothing of the past has been made again
        source = again.dataset.dataset if kind is Numbers else again.dataset._source
        assert source.made == 23 - position["workers"]["0"]["dataset"]["next"]
    # The passes after that are whole ones.
    set_epoch(again, 2)
    fresh = begun(2)
    assert seen(again) == seen(fresh)
    assert len(first) + len(rest) == len(seen(begun(1)))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_pass_that_was_left_is_forgotten(workers):
    data = loader(Numbers(), workers)
    whole = seen(data)
    next(iter(data))
    assert seen(data) == whole
    batches = iter(data)
    for _ in range(12):
        next(batches)
    again = loader(Numbers(), workers)
    assert restore_loader_state(again, loader_state(data))
    assert seen(again) == []
    assert seen(again) == whole


@pytest.mark.parametrize("kind", [Numbers, Parted])
def test_workers_that_live_on_take_a_position(kind):
    data = loader(kind(), workers=2, persistent_workers=True)
    batches = iter(data)
    begun = [next(batches).tolist() for _ in range(3)]
    position = data.state_dict()
    rest = [batch.tolist() for batch in batches]
    data.load_state_dict(position)
    assert seen(data) == rest
    assert seen(data) == begun + rest


class UnlikeParts(Numbers):
    def split_over(self, part: int, parts: int) -> Numbers:
        return Numbers([2, 9, 5][part])


@pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker processes")  # two of which are left
@pytest.mark.parametrize("taken", [3, 4, 5, 6, 7])
def test_batches_come_in_the_same_order_after_some_workers_have_ended(taken: int):
    batches = iter(loader(UnlikeParts(), workers=3))
    whole = [batch.tolist() for batch in batches]
    begun = loader(UnlikeParts(), workers=3)
    for _ in zip(range(taken), begun, strict=False):
        pass
    again = loader(UnlikeParts(), workers=3)
    again.load_state_dict(begun.state_dict())
    assert seen(again) == whole[taken:]


@ranks(2)
def test_ranks_may_each_take_back_a_position_of_their_own():
    data = loader(Numbers())
    next(iter(data))
    again = loader(Numbers())
    again.load_state_dict(data.state_dict())
    left = seen(again)
    check_alike(again)
    assert sorted(number for part in all_gather_object(left) for batch in part for number in batch) == sorted(
        order_of(0)[4:]
    )


class PlainParts(Numbers):
    def split_over(self, part: int, parts: int) -> Any:
        return range(part, self.length, parts)


@pytest.mark.parametrize("workers", [0, 2])
def test_parts_need_not_say_where_they_are(workers):
    data = loader(PlainParts(), workers)
    batches = iter(data)
    first = next(batches).tolist()
    position = data.state_dict()
    again = loader(PlainParts(), workers)
    with pytest.raises(ValueError, match="PlainParts, or what its `split_over` returns, can't"):
        again.load_state_dict(position)
    assert seen(again) == [first] + [batch.tolist() for batch in batches]


@ranks(2)
def test_a_loader_state_other_workers_is_not_taken():
    data = loader(Parted(), workers=2)
    next(iter(data))
    assert not restore_loader_state(loader(Parted(), workers=0), loader_state(data))
    assert loader_state(loader(Plain())) is None
    assert not restore_loader_state(loader(Plain()), None)


def test_lengths():
    class Sized(Plain):
        def __len__(self) -> int:
            return 23

    assert length_of(loader(Plain())) is None
    assert length_of(loader(Sized())) == 12
    assert length_of(loader(Sized(), drop_last=True)) == 11
    assert length_of(loader(Sized(), split=False)) is None


@pytest.mark.parametrize(
    ("cfg", "says"),
    [
        ({"dataset": Plain(), "shuffle": True}, "an order and an end of its own"),
        ({"dataset": Plain(), "sampler": {"type": "DefaultSampler"}}, "an order and an end of its own"),
        ({"dataset": Plain(), "split": "no"}, "`split` must be True, False or None"),
        ({"dataset": [1, 2], "split": "no"}, "`split` must be True, False or None"),
    ],
)
def test_wrong_configs_are_refused(cfg, says):
    with pytest.raises(ConfigError, match=says):
        build_dataloader(cfg, seed=0)


def test_samples_need_not_be_put_into_batches():
    assert seen(loader(Plain(), batch_size=None)) == [[number] for number in range(23)]


class Shuffled(IterableDataset[int]):
    """Shuffles by one of the global generators."""

    def __init__(self, generator: str) -> None:
        self.generator = generator

    def __iter__(self) -> Iterator[int]:
        order = list(range(23))
        if self.generator == "python":
            random.shuffle(order)
        draws = {"torch": torch.randperm, "numpy": np.random.permutation}
        yield from draws[self.generator](23).tolist() if self.generator in draws else order


@pytest.mark.parametrize("generator", ["torch", "numpy", "python"])
@pytest.mark.parametrize(("workers", "persistent"), [(0, False), (2, False), (2, True)])
def test_each_pass_has_another_order_by_each_generator(generator, workers, persistent):
    found = passes(Shuffled(generator), workers, 4, 3, persistent)
    orders = [[number for batch in one for number in batch] for one in found]
    assert len(set(map(tuple, orders))) == 3
    assert all(sorted(order) == [*range(23)] for order in orders)
    assert found == passes(Shuffled(generator), 0, 4, 3, persistent=False)


class ShuffledParts(Shuffled):
    def __init__(self, generator: str, part: int = 0, parts: int = 1) -> None:
        super().__init__(generator)
        self.part, self.parts = part, parts

    def split_over(self, part: int, parts: int) -> ShuffledParts:
        return ShuffledParts(self.generator, part, parts)

    def __iter__(self) -> Iterator[int]:
        yield from list(super().__iter__())[self.part :: self.parts]


@ranks(2)
@pytest.mark.parametrize("generator", ["torch", "numpy", "python"])
@pytest.mark.parametrize("workers", [0, 2])
def test_parts_of_a_shuffled_stream_belong_to_one_order(generator, workers):
    for draw in (torch.manual_seed, np.random.seed, random.seed):
        draw(get_rank())
    by_rank = all_gather_object(passes(ShuffledParts(generator), workers, 4, 2, persistent=False))
    for epoch in range(2):
        assert sorted(number for one in by_rank for batch in one[epoch] for number in batch) == [*range(23)]
    assert by_rank[0][0] != by_rank[0][1]


class Unpicklable(Plain):
    def state_dict(self) -> dict[str, Any]:
        return {"key": lambda: 0}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@ranks(1)
@pytest.mark.parametrize("workers", [0, 1])
def test_a_state_that_cannot_be_pickled_is_named_and_ends_the_pass(workers: int):
    with pytest.raises(ConfigError, match="`state_dict` of Unpicklable must return what a checkpoint can hold"):
        list(build_dataloader({"dataset": Unpicklable(), "batch_size": 2, "num_workers": workers}, seed=0))


@ranks(2)
def test_samples_with_sparse_and_nested_tensors_are_compared_by_their_other_values():
    batches = loader(Graphs(), collate_fn=lambda samples: [sample["number"] for sample in samples])
    assert [*batches] == ([[0.0, 2.0], [4.0, 6.0]], [[1.0, 3.0], [5.0, 7.0]])[get_rank()]
    assert len(set(batches.head)) == len(batches.head) > 6
