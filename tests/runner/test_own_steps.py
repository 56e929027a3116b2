"""A Runner calls a model's own steps, and trains what is unfrozen on the way, under each of torch's strategies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.data import TensorDataset

from lockstep.dist import get_world_size
from lockstep.hooks import Hook
from lockstep.model import BaseModel, unwrap_model
from lockstep.runner import Runner
from lockstep.testing import run_ranks

X = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))
Y = X.sum(1, keepdim=True).sign()
STRATEGIES = ["ddp", "fsdp"]


class Plain(nn.Module):
    """Knows nothing of lockstep but the arguments of a step."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.head = nn.Linear(4, 1)
        self.calls: dict[str, int] = {}

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))

    def train_step(self, data, optim_wrapper):
        self._count("train_step")
        x, y = data
        with optim_wrapper.optim_context(self):
            loss = F.mse_loss(self(x), y) + F.mse_loss(self(0.5 * x), 0.5 * y)
        optim_wrapper.update_params(loss)
        return {"loss": loss.detach()}

    def val_step(self, data):
        self._count("val_step")
        return (self(data[0]) > 0).long().flatten(), (data[1] > 0).long().flatten()

    def _count(self, name: str) -> None:
        self.calls[name] = self.calls.get(name, 0) + 1


class Derived(BaseModel):
    def __init__(self) -> None:
        super().__init__()
        self.net = Plain()
        self.calls = self.net.calls

    def forward(self, x: Tensor, y: Tensor, mode: str = "tensor"):
        loss = F.mse_loss(self.net(x), y)
        return {"loss": loss} if mode == "loss" else loss

    def train_step(self, data, optim_wrapper):
        self.net._count("train_step")
        flipped = super().train_step((data[0].flip(1), data[1]), optim_wrapper)
        return {**flipped, **super().train_step(data, optim_wrapper)}


class Gan(Plain):
    def train_step(self, data, optim_wrapper):
        self._count("train_step")
        x, y = data
        d_loss = F.mse_loss(self.head(self.body(x).detach()), y)
        optim_wrapper["head"].update_params(d_loss)
        g_loss = self.head(self.body(x)).mean()
        optim_wrapper["body"].update_params(g_loss)
        optim_wrapper["head"].zero_grad()
        return {"loss": g_loss.detach(), "d_loss": d_loss.detach()}


def train(kind: type[Plain], work_dir: Path, **changes: Any) -> tuple[dict[str, Tensor], dict[str, int]]:
    torch.manual_seed(3)
    model = kind()
    one = {"optimizer": {"type": "AdamW", "lr": 0.05}, "clip_grad": {"max_norm": 1.0}}
    arguments = {
        "train_dataloader": {"dataset": TensorDataset(X, Y), "batch_size": 8 // get_world_size()},
        "train_cfg": {"max_epochs": 3},
        "optim_wrapper": {"body": one, "head": one} if kind is Gan else one,
        "randomness": {"seed": 1},
        **changes,
    }
    if kind is Plain:
        arguments["val_dataloader"] = {"dataset": TensorDataset(X, Y), "batch_size": 8 // get_world_size()}
        arguments["val_evaluator"] = {"type": "Accuracy"}
    runner = Runner(model, work_dir, **arguments)
    runner.train()
    return _whole(runner.strategy.model_state()), unwrap_model(runner.model).calls


def _whole(state: dict[str, Any]) -> dict[str, Tensor]:
    return {name: getattr(value, "full_tensor", value.clone)() for name, value in state.items()}


def assert_close(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, value in left.items():
        torch.testing.assert_close(value, right[name], rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("kind", [Plain, Derived, Gan])
def test_own_steps_are_called_as_often_as_under_single_with_the_same_result(kind, strategy, tmp_path: Path):
    ((alone, calls),) = run_ranks(1, train, kind, tmp_path / "one", strategy="single")
    assert calls["train_step"] == 6
    for state, found in run_ranks(2, train, kind, tmp_path / "two", strategy=strategy):
        assert found == calls
        assert_close(state, alone)


class Unfreeze(Hook):
    def before_train_epoch(self, runner) -> None:
        runner.model.requires_grad_(True)
        unwrap_model(runner.model).body.requires_grad_(runner.epoch >= 1)


class Frozen(Plain):
    train_step = None  # the Runner's

    def __init__(self) -> None:
        super().__init__()
        self.body.requires_grad_(False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(super().forward(x), y)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_is_unfrozen_in_the_second_epoch_is_trained_from_then_on(strategy, tmp_path: Path):
    options = {"custom_hooks": [Unfreeze()]}
    ((before, _),) = run_ranks(1, train, Frozen, tmp_path / "no", train_cfg={"max_epochs": 1}, **options)
    ((alone, _),) = run_ranks(1, train, Frozen, tmp_path / "one", **options)
    assert not torch.equal(before["body.0.weight"], alone["body.0.weight"])
    for state, _ in run_ranks(2, train, Frozen, tmp_path / "two", strategy=strategy, **options):
        assert_close(state, alone)


class Loss(Plain):
    train_step = None

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(super().forward(x), y)


def test_parameters_that_no_optimizer_holds_are_named_once(tmp_path: Path):
    model = Loss()
    optimizer = torch.optim.SGD(model.head.parameters(), lr=0.1)
    loader = {"dataset": TensorDataset(X, Y), "batch_size": 8}
    runner = Runner(model, tmp_path, train_dataloader=loader, optim_wrapper=optimizer, train_cfg={"max_epochs": 2})
    runner.train()
    told = [line for line in (runner.run_dir / "log.txt").read_text().splitlines() if "has not been given them" in line]
    assert len(told) == 1
    assert "body.0.weight, body.0.bias" in told[0]


class Returns(Loss):
    def __init__(self, what: Any) -> None:
        super().__init__()
        self.what = what

    def train_step(self, data, optim_wrapper):
        loss = self(*data)
        optim_wrapper.update_params(loss)
        return self.what(loss)


@pytest.mark.parametrize(
    ("what", "recorded"),
    [(lambda loss: None, set()), (lambda loss: {"loss": loss, "rate": numpy.float32(0.5)}, {"loss", "rate"})],
)
def test_a_step_may_return_numbers_or_nothing(what, recorded: set[str], tmp_path: Path):
    loader = {"dataset": TensorDataset(X, Y), "batch_size": 8}
    runner = Runner(Returns(what), tmp_path, train_dataloader=loader, train_cfg={"max_epochs": 1})
    runner.train()
    record = json.loads((runner.run_dir / "metrics.jsonl").read_text().splitlines()[0])
    assert record.keys() & {"loss", "rate"} == recorded


@pytest.mark.parametrize(
    ("what", "told"),
    [
        (lambda loss: loss, "must return a dict of values to log, .* but returned a Tensor"),
        (lambda loss: {"loss": loss, "note": "hi"}, "but returned 'hi' as 'note'"),
        (lambda loss: {"loss": loss, "each": loss.expand(3)}, r"but returned a tensor of shape \(3,\) as 'each'"),
    ],
)
def test_what_can_not_be_logged_is_named(what, told, tmp_path: Path):
    loader = {"dataset": TensorDataset(X, Y), "batch_size": 8}
    with pytest.raises(TypeError, match=told):
        Runner(Returns(what), tmp_path, train_dataloader=loader, train_cfg={"max_epochs": 1}).train()
