"""Runs with samplers and loaders of a user's own: who sees what, and that every sample counts once."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Sampler, TensorDataset, WeightedRandomSampler

from lockstep.dist import all_gather_object, get_world_size
from lockstep.errors import ConfigError
from lockstep.evaluator import BaseMetric
from lockstep.runner import Runner
from lockstep.testing import ranks

NUMBERS = torch.arange(20.0).unsqueeze(1)
DATA = TensorDataset(NUMBERS, NUMBERS)
BATCHES = [[0, 1, 2], [3], [4, 5], [6, 7, 8, 9], [10], [11, 12], [13, 14]]


class Net(nn.Module):
    """Notes the samples that it is shown."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(1, 1)
        self.seen: list[list[int]] = []

    def forward(self, x: Tensor, y: Tensor, mode: str = "tensor"):
        self.seen.append(x.flatten().int().tolist())
        if mode == "predict":
            return x.flatten().tolist()
        return (self.linear(x / 20) - y / 20).square().mean()


class Noted(BaseMetric):
    """Notes the samples that count."""

    def process(self, data_batch: Any, data_samples: Any) -> None:
        self.results.extend(data_samples)

    def compute_metrics(self, results: list[float]) -> dict[str, float]:
        self.counted = sorted(map(int, results))
        return {"count": len(results)}


def train(work_dir: Path, loader: Any, **train_cfg: Any) -> list[list[list[int]]]:
    """Return the batches of each rank."""
    model = Net()
    optim_wrapper = {"optimizer": {"type": "SGD", "lr": 0.1}}
    common = {"optim_wrapper": optim_wrapper, "randomness": {"seed": 1}, "visualizer": []}
    Runner(model, work_dir, train_dataloader=loader, train_cfg=train_cfg, **common).train()
    return all_gather_object(model.seen)


def validate(work_dir: Path, loader: Any) -> list[int]:
    """Return the samples that have counted."""
    metric = Noted()
    runner = Runner(Net(), work_dir, val_dataloader=loader, val_cfg={}, val_evaluator=metric, visualizer=[])
    runner.val()
    return next(counted for counted in all_gather_object(vars(metric).get("counted")) if counted is not None)


class Buckets(Sampler[list[int]]):
    def __iter__(self) -> Iterator[list[int]]:
        return iter(random.sample(BATCHES, len(BATCHES)))

    def __len__(self) -> int:
        return len(BATCHES)


class Unsized(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(20).tolist()


class Shrinking(Buckets):
    """Has fewer batches in each epoch, and says so only then."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        return iter(BATCHES[: len(self)])

    def __len__(self) -> int:
        return 7 - 2 * self.epoch


@ranks(2, 4)
def test_an_epoch_of_a_batch_sampler_shows_each_batch_once(tmp_path: Path):
    parts = train(tmp_path, DataLoader(DATA, batch_sampler=Buckets()), max_epochs=2)
    size = get_world_size()
    length = -(-7 // size)
    for begin in (0, length):
        epoch = [part[begin : begin + length] for part in parts]
        # Ranks that have run out repeat their last batch, which counts for nothing.
        own = [batches[: len(range(rank, 7, size))] for rank, batches in enumerate(epoch)]
        assert sorted(chain.from_iterable(own)) == BATCHES
    assert parts[0][:length] != parts[0][length:]


@ranks(1, 2)
def test_a_sampler_without_a_length_is_for_iterations(tmp_path: Path):
    loader = DataLoader(DATA, sampler=Unsized(), batch_size=4 // get_world_size())
    parts = train(tmp_path, loader, by_epoch=False, max_iters=10)
    for begin in (0, 5):
        shown = chain.from_iterable(batch for part in parts for batch in part[begin : begin + 5])
        assert sorted(shown) == list(range(20))
    with pytest.raises(ConfigError, match="must have a length to be counted in epochs"):
        train(tmp_path, loader, max_epochs=1)


@ranks(2)
def test_epochs_of_other_lengths_than_announced_are_refused_and_fine_by_iterations(tmp_path: Path):
    with pytest.raises(
        ConfigError, match=r"have 4 iterations in every epoch, as its length says, but had 3 in epoch 2\."
    ):
        train(tmp_path, DataLoader(DATA, batch_sampler=Shrinking()), max_epochs=3)
    parts = train(tmp_path, DataLoader(DATA, batch_sampler=Shrinking()), by_epoch=False, max_iters=8)
    assert [len(part) for part in parts] == [8, 8]
    assert parts[0][4:7] == BATCHES[:5:2]


LOADERS = {
    "batches": lambda: DataLoader(DATA, batch_sampler=BATCHES),
    "batch sampler": lambda: DataLoader(DATA, batch_sampler=Buckets()),
    "few batches": lambda: DataLoader(DATA, batch_sampler=[[3, 4], [5]]),
    "indices": lambda: DataLoader(DATA, sampler=[3, 1, 4], batch_size=2),
    "without a length": lambda: DataLoader(DATA, sampler=Unsized(), batch_size=3),
    "generator": lambda: DataLoader(DATA, sampler=(index for index in range(20)), batch_size=3),
    "tensor": lambda: DataLoader(DATA, sampler=torch.arange(0, 20, 3), batch_size=3),
    "config": lambda: {"dataset": DATA, "sampler": {"type": "SubsetRandomSampler", "indices": [1, 7, 9]}},
}
COUNTED = {
    "batches": range(15),
    "batch sampler": range(15),
    "few batches": [3, 4, 5],
    "indices": [1, 3, 4],
    "tensor": range(0, 20, 3),
    "config": [1, 7, 9],
}


@ranks(1, 4)
@pytest.mark.parametrize("kind", LOADERS)
def test_in_validation_each_sample_counts_once(kind: str, tmp_path: Path):
    assert validate(tmp_path, LOADERS[kind]()) == list(COUNTED.get(kind, range(20)))


@ranks(1, 2)
def test_a_weighted_sampler_by_name_trains_on_the_same_global_batches(tmp_path: Path):
    weights = [1.0] * 10 + [0.0] * 10
    sampler = {"type": "WeightedRandomSampler", "weights": weights, "num_samples": 16}
    cfg = {"dataset": DATA, "sampler": sampler, "batch_size": 4 // get_world_size()}
    parts = train(tmp_path, cfg, max_epochs=2)
    own = DataLoader(DATA, sampler=WeightedRandomSampler(weights, 16), batch_size=4 // get_world_size())
    assert train(tmp_path, own, max_epochs=2) == parts
    together = [sorted(chain.from_iterable(batches)) for batches in zip(*parts, strict=True)]
    torch.default_generator.manual_seed(1)
    expected = list(WeightedRandomSampler(weights, 16))
    assert together[:4] == [sorted(expected[begin : begin + 4]) for begin in range(0, 16, 4)]
    assert max(map(max, together)) < 10
