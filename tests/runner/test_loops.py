"""Loops do what one writes by hand, and call hooks where they say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lockstep.dataset import DefaultSampler
from lockstep.dist import all_gather, get_rank, get_world_size
from lockstep.errors import CollectiveMismatchError, ConfigError
from lockstep.hooks import Hook
from lockstep.runner import Runner
from lockstep.testing import ranks, run_ranks

X = torch.randn(24, 5, generator=torch.Generator().manual_seed(1))
Y = X.sin().sum(1, keepdim=True)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.layers(x) - y).square().mean()


class Losses(Hook):
    """Keeps the losses of every iteration, and the weights after training."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None) -> None:
        self.values.append(outputs["loss"].item())


def runner_losses(work_dir: Path, batch_size: int, kind: type[Net] = Net, **changes: Any) -> list[float]:
    torch.manual_seed(0)
    losses = Losses()
    Runner(
        **{
            "model": kind(),
            "work_dir": work_dir,
            "train_dataloader": {"dataset": TensorDataset(X, Y), "batch_size": batch_size},
            "optim_wrapper": {"optimizer": {"type": "AdamW", "lr": 0.01}},
            "train_cfg": {"max_epochs": 2},
            "randomness": {"seed": 7},
            "custom_hooks": [losses],
            "default_hooks": {"checkpoint": None},
            **changes,
        }
    ).train()
    return losses.values


def hand_written_losses(batch_size: int, wrap: bool) -> list[float]:
    torch.manual_seed(0)
    model = Net()
    model = DistributedDataParallel(model) if wrap else model
    sampler = DefaultSampler(X, seed=7)
    loader = DataLoader(TensorDataset(X, Y), batch_size, sampler=sampler)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = model(x, y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses


@ranks(1, 2)
def test_losses_are_bitwise_those_of_a_loop_by_hand(tmp_path: Path):
    batch_size = 8 // get_world_size()
    losses = runner_losses(tmp_path, batch_size)
    assert len(losses) == 6
    assert losses == hand_written_losses(batch_size, wrap=get_world_size() > 1)


def test_losses_depend_on_the_global_batch_and_not_on_the_number_of_ranks(tmp_path: Path):
    (alone,) = run_ranks(1, runner_losses, tmp_path, 8)
    for size in (2, 4):
        by_rank = run_ranks(size, runner_losses, tmp_path, 8 // size)
        means = [sum(values) / size for values in zip(*by_rank, strict=True)]
        assert means == pytest.approx(alone, rel=1e-5)


def test_accumulation_makes_one_update_of_several_batches(tmp_path: Path):
    def weights(batch_size: int, counts: int) -> Tensor:
        model = Net()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(0.1)
        optim_wrapper = {"optimizer": {"type": "SGD", "lr": 0.1}, "accumulative_counts": counts}
        runner_losses(tmp_path, batch_size, model=model, optim_wrapper=optim_wrapper)
        return torch.cat([parameter.flatten() for parameter in model.parameters()])

    assert torch.allclose(weights(8, 1), weights(2, 4), rtol=1e-5)


class Points(Hook):
    priority = "LOWEST"

    def __init__(self) -> None:
        self.calls: list[str] = []


for _point in [name for name in vars(Hook) if name.startswith(("before_", "after_"))]:

    def _note(self, runner, _point=_point, **kwargs) -> None:
        expected = {"metrics"} if _point in ("after_val_epoch", "after_test_epoch") else set()
        if _point.endswith("_iter"):
            expected = {"batch_idx", "data_batch"} | ({"outputs"} if _point.startswith("after") else set())
        if "checkpoint" in _point:
            expected = {"checkpoint"}
        assert set(kwargs) == expected
        self.calls.append(f"{_point}@{runner.epoch}.{runner.iter}")

    setattr(Points, _point, _note)


class Scores(Net):
    def forward(self, x: Tensor, y: Tensor, mode: str = "tensor"):
        return super().forward(x, y) if mode == "loss" else (self.layers(x).flatten() > 0, y.flatten() > 0)


def test_hooks_are_called_in_the_order_that_the_docstring_draws(tmp_path: Path):
    points = Points()
    runner_losses(
        tmp_path,
        12,
        kind=Scores,
        train_cfg={"max_epochs": 2, "val_interval": 2},
        val_dataloader={"dataset": TensorDataset(X, Y), "batch_size": 24},
        val_evaluator={"type": "Accuracy"},
        custom_hooks=[points],
    )

    def epoch(number: int) -> list[str]:
        first = 2 * number
        return [
            f"before_train_epoch@{number}.{first}",
            *(f"{when}_train_iter@{number}.{first + i}" for i in (0, 1) for when in ("before", "after")),
            f"after_train_epoch@{number}.{first + 2}",
        ]

    assert points.calls == [
        "before_run@0.0", "before_train@0.0", *epoch(0), *epoch(1), "before_val@2.4", "before_val_epoch@2.4",
        "before_val_iter@2.4", "after_val_iter@2.4", "after_val_epoch@2.4", "after_val@2.4", "after_train@2.4",
        "after_run@2.4",
    ]  # fmt: skip


def test_hooks_go_by_priority_then_by_registration(tmp_path: Path):
    calls: list[str] = []

    class Named(Hook):
        def __init__(self, name: str, priority: Any = "NORMAL") -> None:
            self.name, self.priority = name, priority

        def before_run(self, runner) -> None:
            calls.append(self.name)

    custom = [
        Named("late", "LOW"),
        Named("a"),
        {"type": Named, "name": "b"},
        Named("first", 0),
        {"type": Named, "name": "early", "priority": "high"},
    ]
    runner_losses(tmp_path, 12, custom_hooks=[*custom, Losses()])
    assert calls == ["first", "early", "a", "b", "late"]
    with pytest.raises(ConfigError, match="VERY_LOW, LOWEST, but is 'URGENT'"):
        runner_losses(tmp_path, 12, custom_hooks=[Named("x", "URGENT")])


@ranks(2)
def test_an_error_in_a_hook_names_the_hook_the_point_and_the_rank(tmp_path: Path):
    class Breaks(Hook):
        def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None) -> None:
            if runner.iter == 1:
                raise ZeroDivisionError("broken")

    with pytest.raises(ZeroDivisionError) as caught:
        runner_losses(tmp_path, 4, custom_hooks=[Breaks()])
    assert f"in Breaks.after_train_iter (rank {get_rank()} of 2)" in caught.value.__notes__


def test_a_loop_by_iterations_passes_through_the_data_as_often_as_it_takes(tmp_path: Path):
    points = Points()
    by_iter = runner_losses(
        tmp_path,
        8,
        train_cfg={"max_iters": 5, "val_interval": 2},
        custom_hooks=[points, losses := Losses()],
        kind=Scores,
        val_dataloader={"dataset": TensorDataset(X, Y), "batch_size": 24},
        val_evaluator={"type": "Accuracy"},
    )
    assert by_iter == []  # the losses went to another hook
    assert losses.values == runner_losses(tmp_path, 8)[:5]
    assert [call for call in points.calls if "train_epoch" in call] == [
        "before_train_epoch@0.0",
        "after_train_epoch@1.5",
    ]
    assert [call for call in points.calls if call.startswith("before_val@")] == [
        "before_val@0.2",
        "before_val@1.4",
        "before_val@1.5",
    ]


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    def __iter__(self):
        return iter(zip(X, Y, strict=True))


def test_data_without_a_length_train_by_iterations(tmp_path: Path):
    loader = {"dataset": Stream(), "batch_size": 8}
    losses = runner_losses(tmp_path, 8, train_dataloader=loader, train_cfg={"by_epoch": False, "max_iters": 4})
    assert len(losses) == 4
    with pytest.raises(ConfigError, match=r"must have a length.*by_epoch=False"):
        runner_losses(tmp_path, 8, train_dataloader=iter([(X, Y)]))
    with pytest.raises(ConfigError, match="yield at least one batch per pass"):
        runner_losses(tmp_path, 8, train_dataloader=[], train_cfg={"max_iters": 1})


@pytest.mark.parametrize("cfg", [{"max_epochs": 9}, {"max_iters": 90}])
def test_a_hook_can_end_the_training(tmp_path: Path, cfg):
    class Stop(Hook):
        def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None) -> None:
            if runner.iter == 3:
                runner.train_loop.stop_training = True

    losses = Losses()
    runner_losses(tmp_path, 8, train_cfg=cfg, custom_hooks=[Stop(), losses])
    assert len(losses.values) == (6 if "max_epochs" in cfg else 4)


@ranks(2, fresh=True)
def test_a_stop_on_one_rank_holds_for_all_after_an_epoch_and_is_told_after_an_iteration(tmp_path: Path):
    class Stop(Hook):
        def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None) -> None:
            runner.train_loop.stop_training |= runner.iter == 3 and get_rank() == 1

    data = {"dataset": TensorDataset(X, Y), "batch_size": 4}
    losses = Losses()
    # The last epoch ends in a validation, which all ranks must come to.
    cfg = {"max_epochs": 9, "val_interval": 9}
    runner_losses(tmp_path, 4, train_cfg=cfg, custom_hooks=[Stop(), losses], val_dataloader=data)
    assert len(losses.values) == 6
    with pytest.raises(CollectiveMismatchError) as raised:
        runner_losses(tmp_path, 4, train_cfg={"max_iters": 90}, custom_hooks=[Stop()])
    if get_rank() == 1:
        assert "Rank 1 has left the loop after 4 iterations, by `stop_training`" in str(raised.value.__notes__)


def test_validation_begins_and_repeats_when_it_is_told(tmp_path: Path):
    def validated(**cfg: int) -> list[str]:
        points = Points()
        runner_losses(
            tmp_path,
            24,
            kind=Scores,
            train_cfg=cfg,
            custom_hooks=[points],
            val_dataloader={"dataset": TensorDataset(X, Y), "batch_size": 24},
            val_evaluator={"type": "Accuracy"},
        )
        return [call.removeprefix("before_val@") for call in points.calls if call.startswith("before_val@")]

    assert validated(max_epochs=5, val_interval=2) == ["2.2", "4.4", "5.5"]
    assert validated(max_epochs=4, val_begin=3) == ["3.3", "4.4"]


@ranks(2)
def test_running_statistics_are_one_set_when_they_are_looked_at(tmp_path: Path):
    class Normalised(Scores):
        def __init__(self) -> None:
            super().__init__()
            self.layers.insert(0, nn.BatchNorm1d(5))

    seen: list[Tensor] = []

    class Look(Hook):
        def after_train_epoch(self, runner) -> None:
            seen.append(runner.model.module.layers[0].running_mean.clone())

        def before_val_iter(self, runner, batch_idx, data_batch=None) -> None:
            seen.append(runner.model.module.layers[0].running_mean.clone())

    runner_losses(
        tmp_path,
        4,
        kind=Normalised,
        custom_hooks=[Look()],
        train_cfg={"max_epochs": 1},
        val_dataloader={"dataset": TensorDataset(X, Y), "batch_size": 12},
        val_evaluator={"type": "Accuracy"},
    )
    own, shared = (all_gather(value) for value in seen)
    assert not torch.equal(*own)
    assert torch.equal(*shared)
    assert torch.allclose(shared[0], torch.stack(own).mean(0))
