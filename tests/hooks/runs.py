"""Small runs for the tests of hooks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lockstep.dist import get_world_size
from lockstep.evaluator import BaseMetric
from lockstep.hooks import Hook
from lockstep.runner import Runner

X = torch.randn(24, 3, generator=torch.Generator().manual_seed(1))
Y = X.sum(1, keepdim=True)


class Net(nn.Module):
    """Learns the sum of its inputs; predicts nothing but its weights' sum."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.linear = nn.Linear(3, 1)

    def forward(self, x: Tensor, y: Tensor, mode: str = "tensor"):
        if mode == "predict":
            return self.linear.weight.detach().clone(), self.norm.running_mean.clone()
        return (self.linear(self.norm(x)) - y).square().mean()


class Predicted(BaseMetric):
    """Keeps what the model predicted in each validation."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[Tensor, Tensor]] = []

    def process(self, data_batch: Any, data_samples: Any) -> None:
        self.results.append(0)
        self.last = data_samples

    def compute_metrics(self, results: list[Any]) -> dict[str, float]:
        return {"accuracy": 0.0}

    def evaluate(self, size: int | None) -> dict[str, Any]:
        self.seen.append(self.last)
        return super().evaluate(size)


class Scripted(BaseMetric):
    """Yields a number of a list after each validation."""

    def __init__(self, values: list[float], name: str = "accuracy") -> None:
        super().__init__()
        self.name, self.values = name, values

    def process(self, data_batch: Any, data_samples: Any) -> None:
        self.results.append(0)

    def compute_metrics(self, results: list[Any]) -> dict[str, float]:
        return {self.name: self.values.pop(0)}


def make_data() -> dict[str, Any]:
    return {"dataset": TensorDataset(X, Y), "batch_size": 6 // get_world_size()}


def make_runner(
    work_dir: Path,
    hooks: list[Hook | dict[str, Any]],
    metric: BaseMetric | None = None,
    kind: type[nn.Module] = Net,
    **changes: Any,
) -> Runner:
    """Return a runner whose model begins alike everywhere, of four iterations per epoch on all ranks together."""
    torch.manual_seed(3)
    data = make_data()
    validation = {} if metric is None else {"val_dataloader": data, "val_evaluator": metric}
    return Runner(
        **{
            "model": kind(),
            "work_dir": work_dir,
            "train_dataloader": data,
            "train_cfg": {"max_epochs": 2},
            "optim_wrapper": {"optimizer": {"type": "SGD", "lr": 0.1}},
            "custom_hooks": hooks,
            "randomness": {"seed": 7},
            "visualizer": [],
            **validation,
            **changes,
        }
    )
