"""Schedule-free optimizers train other weights than they evaluate and save: their `train` and `eval` are called."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.runs import StopAfter
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lockstep import Runner, Session
from lockstep.dist import get_world_size
from lockstep.evaluator import BaseMetric
from lockstep.registry import OPTIMIZERS
from lockstep.testing import ranks

X = torch.randn(16, 2, generator=torch.Generator().manual_seed(1))
BETA = 0.9


@OPTIMIZERS.register_module(force=True)
class FreeSGD(torch.optim.Optimizer):
    """Schedule-free SGD, as of the package schedulefree: y is trained, x = y + (1 - 1 / beta) (z - y) evaluated."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "train_mode": False, "k": 0})

    @torch.no_grad()
    def _switch(self, training: bool, weight: float) -> None:
        for group in self.param_groups:
            if group["train_mode"] != training:
                for parameter in group["params"]:
                    if "z" in self.state[parameter]:
                        parameter.lerp_(self.state[parameter]["z"], weight)
                group["train_mode"] = training

    def train(self) -> None:
        self._switch(True, 1 - BETA)

    def eval(self) -> None:
        self._switch(False, 1 - 1 / BETA)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            assert group["train_mode"], "the optimizer must be in its mode for training"
            group["k"] += 1
            for y in group["params"]:
                z = self.state[y].setdefault("z", y.detach().clone())
                y.lerp_(z, 1 / group["k"])
                y.add_(y.grad, alpha=group["lr"] * (BETA * (1 - 1 / group["k"]) - 1))
                z.sub_(y.grad, alpha=group["lr"])


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))


def by_hand(epochs: int) -> list[float]:
    """Return the loss of the evaluated weights after each epoch, in one process."""
    model = network()
    optimizer = FreeSGD(model.parameters(), lr=0.5)
    losses = []
    for _ in range(epochs):
        optimizer.train()
        for batch in X.split(4):
            loss_of(model(batch)).backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.eval()
        losses.append(loss_of(model(X)).item())
    return losses


def loss_of(outputs: Tensor) -> Tensor:
    return (outputs - 1).square().mean()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def forward(self, x: Tensor, mode: str = "loss") -> Any:
        return loss_of(self.net(x)) if mode == "loss" else [{"loss": row} for row in (self.net(x) - 1).square()]


class Loss(BaseMetric):
    def process(self, data_batch: Any, data_samples: Any) -> None:
        self.results.extend(float(sample["loss"]) for sample in data_samples)

    def compute_metrics(self, results: list[Any]) -> dict[str, float]:
        SEEN.append(sum(results) / len(results))
        return {"loss": SEEN[-1]}


SEEN: list[float] = []


def train(work_dir: Path, strategy: str, **changes: Any) -> tuple[list[float], list[Tensor]]:
    SEEN.clear()
    loader = {"dataset": TensorDataset(X), "batch_size": 4 // get_world_size()}
    runner = Runner(
        Model(),
        work_dir,
        train_dataloader={**loader, "sampler": {"shuffle": False}},
        val_dataloader=loader,
        val_evaluator=Loss(),
        train_cfg={"max_epochs": 3},
        optim_wrapper={"optimizer": {"type": "FreeSGD", "lr": 0.5}},
        strategy="ddp" if strategy == "single" and get_world_size() > 1 else strategy,
        custom_hooks=[StopAfter(changes.pop("stop_after", None))],
        randomness={"seed": 0},
        visualizer=[],
        log_level="ERROR",
        **{"default_hooks": {"checkpoint": {"save_best": "loss"}}, **changes},
    )
    runner.train()
    weights = runner.run.strategy.model_state().values()
    return list(SEEN), [getattr(one, "full_tensor", lambda one=one: one)().clone() for one in weights]


@pytest.mark.parametrize("strategy", ["single", "fsdp"])
@ranks(1, 2)
def test_a_runner_validates_and_saves_the_evaluated_weights(tmp_path, strategy):
    losses, weights = train(tmp_path / "straight", strategy)
    if losses:  # of rank 0
        assert losses == pytest.approx(by_hand(3), rel=1e-4)
    hooks = {"default_hooks": {"checkpoint": {"by_epoch": False, "interval": 2}}}
    straight, weights = train(tmp_path / "saved often", strategy, **hooks)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "cut", strategy, stop_after=6, **hooks)
    resumed, again = train(tmp_path / "cut", strategy, resume=True, **hooks)
    assert resumed == straight[1:]
    for one, other in zip(weights, again, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize("strategy", ["single", "fsdp"])
@ranks(1, 2)
def test_a_session_evaluates_and_saves_them_too(tmp_path, strategy):
    strategy = "ddp" if strategy == "single" and get_world_size() > 1 else strategy

    def loop(epochs: int, **options: Any) -> list[float]:
        session = Session(tmp_path, strategy=strategy, randomness={"seed": 0}, log_level="ERROR", **options)
        model = network()
        loader = DataLoader(TensorDataset(X), batch_size=4 // get_world_size())
        model, _, batches = session.prepare(model, FreeSGD(model.parameters(), lr=0.5), loader)
        test, losses = session.prepare_evaluation(loader), []
        for _ in session.epochs(epochs):
            for (x,) in batches:
                session.step(loss_of(model(x)))
            with torch.no_grad():
                losses.append(torch.stack([session.gather((model(x) - 1).square()).mean() for (x,) in test]).mean())
            assert not session.run.optim_wrapper.is_training
        return [loss.item() for loss in losses]

    assert loop(2) == pytest.approx(by_hand(3)[:2], rel=1e-4)
    assert loop(3, resume=True) == pytest.approx(by_hand(3)[2:], rel=1e-4)
