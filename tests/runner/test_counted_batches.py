"""What batches count for whose length is not their number of samples: concatenated graphs, and tokens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, Sampler

from lockstep.dataset import build_dataloader
from lockstep.dataset.position import CountedBatches
from lockstep.dist import all_gather_object, get_world_size
from lockstep.errors import ConfigError
from lockstep.runner import Runner
from lockstep.runner.uneven_inputs import EvenBatches
from lockstep.testing import ranks

NODES = [1, 9, 2, 3, 1, 4, 2]
GRAPHS = [torch.linspace(-1, 1, 2 * count).reshape(count, 2) * (index + 1) for index, count in enumerate(NODES)]
BATCHES = [[0, 1, 2, 3], [4, 5, 6]]


def together(graphs: list[Tensor]) -> dict[str, Tensor]:
    """Concatenate the nodes of graphs."""
    return {"nodes": torch.cat(graphs), "graph": torch.repeat_interleave(torch.tensor([len(one) for one in graphs]))}


class InTwo(Sampler[list[int]]):
    def __iter__(self) -> Iterator[list[int]]:
        return iter(BATCHES)

    def __len__(self) -> int:
        return 2


class Graphs(nn.Module):
    """Its loss is the mean over graphs of the square of what a graph's nodes add up to."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 1)
        nn.init.constant_(self.linear.weight, 0.5)
        nn.init.constant_(self.linear.bias, 0.1)

    def forward(self, nodes: Tensor, graph: Tensor) -> Tensor:
        count = int(graph.max()) + 1
        sums = torch.zeros(count, 1, dtype=nodes.dtype).index_add(0, graph, self.linear(nodes))
        return sums.square().mean()


def by_hand() -> list[float]:
    model = Graphs()
    model(**together(GRAPHS)).backward()
    return [value for one in model.parameters() for value in (one - one.grad).detach().flatten().tolist()]


LOADERS = {
    "batch sampler": lambda **more: DataLoader(GRAPHS, batch_sampler=InTwo(), collate_fn=together, **more),
    "config": lambda **more: {"dataset": GRAPHS, "batch_sampler": InTwo(), "collate_fn": together, **more},
    "lists": lambda **more: DataLoader(Lists(), sampler=InTwo(), batch_size=None, **more),
}


class Lists:
    """Makes a batch at once, from a list of indices."""

    def __len__(self) -> int:
        return len(GRAPHS)

    def __getitem__(self, indices: list[int]) -> dict[str, Tensor]:
        return together([GRAPHS[index] for index in indices])


@ranks(1, 2)
@pytest.mark.parametrize("strategy", [None, "fsdp"])
@pytest.mark.parametrize("kind", LOADERS)
def test_every_graph_counts_alike(kind: str, strategy: Any, tmp_path: Path):
    model = Graphs()
    Runner(
        model, tmp_path, train_dataloader=LOADERS[kind](), train_cfg={"max_epochs": 1}, strategy=strategy,
        optim_wrapper={
            "optimizer": {"type": "SGD", "lr": 1.0}, "accumulative_counts": 2 // get_world_size(),
        },
        default_hooks={"checkpoint": None}, visualizer=[], log_level="ERROR",
    ).train()  # fmt: skip
    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    weights = [value for one in whole for value in one.detach().flatten().tolist()]
    assert weights == pytest.approx(by_hand(), rel=1e-5)


@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.parametrize(("workers", "persistent"), [(0, False), (2, False), (2, True)])
def test_batches_are_counted_in_each_pass(kind: str, workers: int, persistent: bool):
    more = {"num_workers": workers, "multiprocessing_context": "fork", "persistent_workers": persistent}
    loader = build_dataloader(LOADERS[kind](**(more if workers else {})), seed=0)
    even = EvenBatches(loader)
    for _ in range(3):
        assert [batch.samples for batch in even.iterate()] == [4, 3]
        next(even.iterate())  # a pass that is left


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        return iter(GRAPHS)


@ranks(1, 2)
@pytest.mark.parametrize("workers", [0, 1])
def test_a_stream_counts_what_it_collates(workers: int):
    context = {"num_workers": workers, "multiprocessing_context": "fork"} if workers else {}
    loader = build_dataloader({"dataset": Stream(), "batch_size": 2, "collate_fn": together, **context}, seed=0)
    sizes = all_gather_object([batch.samples for batch in EvenBatches(loader).iterate()])
    assert sizes == ([[2, 2, 2, 1]] if get_world_size() == 1 else [[2, 2], [2, 1]])


def test_other_loaders_do_not_tell():
    batches = CountedBatches([torch.ones(3)])
    assert next(batches).shape == (3,)
    assert batches.samples is None


class Sums(nn.Module):
    """Returns what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(()))

    def forward(self, total: Tensor, tokens: Tensor) -> Tensor:
        return self.factor * total / tokens


def mean(outputs: Tensor, batch: Any) -> Tensor:
    return outputs.mean()


@ranks(1, 2)
@pytest.mark.parametrize("trains", [False, True])
def test_the_validation_loss_is_a_mean_over_what_batch_size_of_counts(trains: bool, tmp_path: Path):
    data = [{"total": torch.tensor(2.0), "tokens": torch.tensor(1.0)}]
    data += [{"total": torch.tensor(90.0), "tokens": torch.tensor(9.0)}]
    runner = Runner(
        Sums(), tmp_path, loss=mean, val_dataloader=DataLoader(data, batch_size=1),
        train_dataloader=DataLoader(data, batch_size=1),
        train_cfg={"max_epochs": 1, "batch_size_of": lambda batch: int(batch["tokens"].sum())},
        optim_wrapper={"optimizer": {"type": "SGD", "lr": 0.0}}, default_hooks={"checkpoint": None}, visualizer=[],
        log_level="ERROR",
    )  # fmt: skip
    if trains:
        runner.train()
        assert runner.run.val_loop.metrics["loss"] == pytest.approx(9.2)
    else:
        assert runner.val()["loss"] == pytest.approx(9.2)


@ranks(1, 2)
def test_the_validation_loss_of_graphs_is_a_mean_over_graphs(tmp_path: Path):
    runner = Runner(
        Graphs(), tmp_path, loss=lambda outputs, batch: outputs, val_dataloader=LOADERS["batch sampler"](),
        log_level="ERROR",
    )  # fmt: skip
    with torch.no_grad():
        assert runner.val()["loss"] == pytest.approx(float(Graphs()(**together(GRAPHS))), rel=1e-5)


class Weighed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x).mean()


def trained_by(count: Any, folder: Path) -> float:
    data = torch.tensor([1.0, 4.0])
    model = Weighed()
    Runner(
        model, folder, visualizer=[], log_level="ERROR", optim_wrapper={
            "optimizer": {"type": "SGD", "lr": 1.0}, "accumulative_counts": 2 // get_world_size()
        },
        train_dataloader={"dataset": data, "batch_size": 1, "collate_fn": lambda own: (torch.stack(own),),
                          "shuffle": False},
        train_cfg={"max_epochs": 1, "batch_size_of": count},
    ).train()  # fmt: skip
    return model.weight.item()


@ranks(1, 2)
def test_a_batch_may_count_for_a_fraction(tmp_path: Path):
    expected = -(0.5 * 1 + 2 * 4) / 2.5
    assert trained_by(lambda batch: batch[0].sum() / 2, tmp_path) == pytest.approx(expected)


@ranks(1, 2)
@pytest.mark.parametrize("count", [-1, float("nan")])
def test_it_may_not_count_for_less_than_nothing(count: float, tmp_path: Path):
    with pytest.raises(ConfigError, match="`batch_size_of` must return a number that is not negative, but has"):
        trained_by(lambda batch: count, tmp_path)
