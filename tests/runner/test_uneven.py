"""Training where ranks hold unequal amounts of data: each sample counts once, as in one process that sees them all."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lockstep.dist import all_gather_object, get_rank, get_world_size
from lockstep.hooks import Hook
from lockstep.runner import Runner
from lockstep.testing import ranks

X = torch.randn(40, 3, generator=torch.Generator().manual_seed(1))
Y = X.sum(1, keepdim=True).tanh()
STRATEGIES: dict[str, Any] = {
    "ddp": "ddp",
    "separate": {"type": "ddp", "model_wrapper": {"type": "MMSeparateDistributedDataParallel"}},
    "fsdp": "fsdp",
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.first = nn.Linear(3, 4)
        self.second = nn.Linear(4, 1)
        for parameter in self.parameters():
            nn.init.normal_(parameter, generator=generator)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.second(self.first(x).tanh()) - y).square().mean()


class Losses(Hook):
    def __init__(self) -> None:
        self.samples: list[int] = []

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None) -> None:
        self.samples.append(runner.train_loop.samples)


def batches_of(sizes: list[list[int]]) -> list[list[tuple[Tensor, Tensor]]]:
    """Return batches of these sizes for each rank, of samples that are nobody else's."""
    parts = iter(zip(X, Y, strict=True))
    return [[_stack([next(parts) for _ in range(size)]) for size in own] for own in sizes]


def _stack(samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    return torch.stack([x for x, _ in samples]), torch.stack([y for _, y in samples])


def in_one_process(batches: list[list[tuple[Tensor, Tensor]]], epochs: int, counts: int = 1) -> tuple[Net, list[float]]:
    """Train on all samples of each window at once."""
    net, losses = Net(), []
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    length = max(map(len, batches))
    steps = [[own[index] for own in batches if index < len(own)] for _ in range(epochs) for index in range(length)]
    for begin in range(0, len(steps), counts):
        together = [batch for step in steps[begin : begin + counts] for batch in step]
        losses += [net(*map(torch.cat, zip(*step, strict=True))).item() for step in steps[begin : begin + counts]]
        optimizer.zero_grad()
        net(*map(torch.cat, zip(*together, strict=True))).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
    return net, losses


def train(work_dir: Path, loader: Any, **changes: Any) -> tuple[Net, Runner]:
    net = Net()
    arguments = {
        "train_cfg": {"max_epochs": 2},
        "optim_wrapper": {"optimizer": {"type": "SGD", "lr": 0.1, "momentum": 0.9}, "clip_grad": {"max_norm": 0.5}},
        "visualizer": [],
        "default_hooks": {"logger": {"interval": 1}},
        **changes,
    }
    runner = Runner(net, work_dir, train_dataloader=loader, **arguments)
    runner.train()
    return net, runner


def assert_same_weights(net: nn.Module, expected: nn.Module) -> None:
    for (name, parameter), value in zip(net.named_parameters(), expected.parameters(), strict=True):
        whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        torch.testing.assert_close(whole, value, rtol=1e-6, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")


AMOUNTS = {
    "3, 2, 1, 0 batches": [[2, 2, 2], [2, 2], [2], []],
    "0 batches first": [[], [3, 1], [2, 2, 2], [1]],
    "unequal batches": [[4, 1], [2, 3], [1, 1], [3, 2]],
}


@ranks(2, 4)
@pytest.mark.parametrize(
    ("amounts", "strategy", "counts"),
    [
        (amounts, strategy, 1 + (i + j) % 2)
        for i, amounts in enumerate(AMOUNTS)
        for j, strategy in enumerate(STRATEGIES)
    ],
)
def test_each_sample_counts_once_under_every_wrapper(amounts, strategy, counts, tmp_path: Path):
    batches = batches_of(AMOUNTS[amounts][: get_world_size()])
    net, runner = train(
        tmp_path,
        batches[get_rank()],
        strategy=STRATEGIES[strategy],
        optim_wrapper={
            "optimizer": {"type": "SGD", "lr": 0.1, "momentum": 0.9},
            "clip_grad": {"max_norm": 0.5},
            "accumulative_counts": counts,
        },
    )
    expected, losses = in_one_process(batches, epochs=2, counts=counts)
    assert_same_weights(net, expected)
    assert all_gather_object(runner.iter) == [len(losses)] * get_world_size()
    if get_rank() == 0:
        lines = map(json.loads, (runner.run_dir / "metrics.jsonl").read_text().splitlines())
        assert [line["loss"] for line in lines if line["mode"] == "train"] == pytest.approx(losses, rel=1e-5)


@pytest.mark.parametrize("counts", [1, 2, 3])
def test_batches_of_unequal_sizes_on_one_process(counts, tmp_path: Path):
    batches = batches_of([[4, 1, 2]])
    wrapper = {"optimizer": {"type": "SGD", "lr": 0.1, "momentum": 0.9}, "clip_grad": {"max_norm": 0.5}}
    net, _ = train(tmp_path, batches[0], optim_wrapper={**wrapper, "accumulative_counts": counts})
    assert_same_weights(net, in_one_process(batches, epochs=2, counts=counts)[0])


@ranks(4)
@pytest.mark.parametrize("samples", [3, 9])
@pytest.mark.parametrize("by", ["epochs", "iterations"])
def test_amounts_that_samplers_know(samples, by, tmp_path: Path):
    sizes = [len(range(rank, samples, 4)) for rank in range(4)]
    length = -(-max(sizes) // 2)
    losses = Losses()
    data = {
        "dataset": TensorDataset(X[:samples], Y[:samples]),
        "batch_size": 2,
        "sampler": {"shuffle": False, "round_up": False},
    }
    net, runner = train(
        tmp_path,
        data,
        custom_hooks=[losses],
        train_cfg={"max_epochs": 2} if by == "epochs" else {"max_iters": 2 * length},
        default_hooks={"checkpoint": None},
    )
    dealt = [list(zip(X[rank:samples:4], Y[rank:samples:4], strict=True)) for rank in range(4)]
    batches = [[_stack(part[i : i + 2]) for i in range(0, len(part), 2)] for part in dealt]
    assert_same_weights(net, in_one_process(batches, epochs=2)[0])
    if get_rank() == 0:
        told = f"the ranks have between {length - 1} and {length} batches per pass: those that run out"
        assert told in (runner.run_dir / "log.txt").read_text()
    own = sizes[get_rank()]
    assert losses.samples == [max(0, min(2, own - i)) for i in range(0, 2 * length, 2)] * 2
    assert runner.iter == 2 * length


class Stream:
    """Batches of which nobody knows before how many there are."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


@ranks(2)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_data_without_a_length_run_out_together(strategy, tmp_path: Path):
    batches = batches_of(AMOUNTS["3, 2, 1, 0 batches"][1:3])
    net, runner = train(
        tmp_path, Stream(batches[get_rank()]), train_cfg={"max_iters": 4}, strategy=STRATEGIES[strategy]
    )
    assert_same_weights(net, in_one_process(batches, epochs=2)[0])
    assert runner.epoch == 1


@ranks(2)
def test_what_counts_may_be_something_else_than_samples(tmp_path: Path):
    """Rows whose target is NaN do not count, as padding would not."""

    class Masked(Net):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            real = ~y.isnan().flatten()
            return super().forward(x[real], y[real])

    sizes = [[3, 2], [1, 2]]
    batches = batches_of(sizes)
    padded = [(torch.cat([x, x[:1]]), torch.cat([y, torch.full((1, 1), torch.nan)])) for x, y in batches[get_rank()]]
    net = Masked()
    runner = Runner(
        net,
        tmp_path,
        train_dataloader=padded,
        train_cfg={"max_epochs": 2, "batch_size_of": lambda batch: (~batch[1].isnan()).sum()},
        optim_wrapper={"optimizer": {"type": "SGD", "lr": 0.1, "momentum": 0.9}, "clip_grad": {"max_norm": 0.5}},
        visualizer=[],
    )
    runner.train()
    assert_same_weights(net, in_one_process(batches, epochs=2)[0])
    assert json.loads((runner.run_dir / "environment.json").read_text())["counted_in"] == "units"


class Normalised(Net):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return super().forward(self.norm(x), y)


@ranks(2)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_stand_ins_leave_running_statistics_alone(strategy, tmp_path: Path):
    batches = batches_of([[4, 4, 4], [4]])[get_rank()]
    net = Normalised()
    Runner(
        net,
        tmp_path,
        train_dataloader=batches,
        train_cfg={"max_epochs": 1},
        optim_wrapper={"optimizer": {"type": "SGD", "lr": 0.1}},
        default_hooks={"sync_buffers": None},
        strategy=strategy,
        visualizer=[],
    ).train()
    expected = nn.BatchNorm1d(3)
    for x, _ in batches:
        expected(x)
    assert torch.equal(net.norm.num_batches_tracked, expected.num_batches_tracked)
    torch.testing.assert_close(net.norm.running_mean, expected.running_mean)
