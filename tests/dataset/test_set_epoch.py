"""Datasets that are told the epoch, whatever loader reads them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Subset

from lockstep.dataset import build_dataloader, set_epoch
from lockstep.runner import Runner


def order_of(epoch: int) -> list[int]:
    return torch.randperm(8, generator=torch.Generator().manual_seed(epoch)).tolist()


class Stream(IterableDataset[int]):
    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(order_of(self.epoch))


class Mapped(Dataset[int]):
    """Makes other samples in each epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        return order_of(self.epoch)[index]


DATASETS = {
    "stream": Stream,
    "mapped": Mapped,
    "subset": lambda: Subset(Mapped(), range(8)),
    "joined": lambda: ConcatDataset([Subset(Mapped(), range(4)), Subset(Mapped(), range(4, 8))]),
}


@pytest.mark.parametrize(("workers", "persistent"), [(0, False), (1, False), (1, True)])
@pytest.mark.parametrize("kind", DATASETS)
@pytest.mark.parametrize("by_config", [False, True])
def test_a_dataset_is_told_the_epoch(kind: str, workers: int, persistent: bool, by_config: bool):
    more: dict[str, Any] = {"batch_size": 2}
    if workers:
        more |= {"num_workers": workers, "multiprocessing_context": "fork", "persistent_workers": persistent}
    dataset: Any = DATASETS[kind]()
    if by_config:
        given: Any = {"dataset": dataset, **({} if kind == "stream" else {"shuffle": False}), **more}
    else:
        given = DataLoader(dataset, **more)
    loader = build_dataloader(given, seed=0)
    for epoch in (0, 1, 2, 1):
        set_epoch(loader, epoch)
        assert [int(one) for batch in loader for one in batch] == order_of(epoch)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(1, 1)
        self.seen: list[int] = []

    def forward(self, batch: Tensor) -> Tensor:
        self.seen += batch.tolist()
        return self.linear(batch[:, None].float()).mean()


@pytest.mark.parametrize("kind", ["stream", "mapped"])
def test_a_runner_tells_it(kind: str, tmp_path: Path):
    model = Net()
    loader: Any = DataLoader(DATASETS[kind](), batch_size=4)
    Runner(
        model, tmp_path, train_dataloader=loader, train_cfg={"by_epoch": False, "max_iters": 6}, visualizer=[],
        optim_wrapper={"optimizer": {"type": "SGD", "lr": 0.1}}, default_hooks={"checkpoint": None}, log_level="ERROR",
    ).train()  # fmt: skip
    assert model.seen == [*order_of(0), *order_of(1), *order_of(2)]
