"""A small model with parameters of every fate, and what an optimizer has of it."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.model import unwrap_model
from lockstep.model.shards import reshard
from lockstep.strategy import Strategy

from ..engines.training import whole

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "Adam": {"lr": 0.05, "foreach": False},
    "AMSGrad": {"type": "AdamW", "lr": 0.05, "amsgrad": True},
    "SGD": {"lr": 0.05, "momentum": 0.9, "dampening": 0.3},
    "Nesterov": {"type": "SGD", "lr": 0.05, "momentum": 0.9, "nesterov": True},
    "Plain": {"type": "SGD", "lr": 0.05},
    "NAdam": {"lr": 0.05},
    "RAdam": {"lr": 0.05},
    "Adagrad": {"lr": 0.05, "initial_accumulator_value": 0.1},
    "ASGD": {"lr": 0.05, "t0": 2},
    "Rprop": {"lr": 0.05},
    "Adafactor": {"lr": 0.05},
    "RMSprop": {"lr": 0.05, "momentum": 0.5, "centered": True},
}


class PartlyUsed(nn.Module):
    """`unused` never has a gradient, `late` has one in later batches alone, and `frozen` wants none."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 5)
        self.tied = nn.Linear(3, 5, bias=False)
        self.tied.weight = self.first.weight
        self.late = nn.Linear(5, 2)
        self.unused = nn.Linear(2, 3)
        self.frozen = nn.Parameter(torch.ones(5), requires_grad=False)

    def forward(self, x: Tensor, late: Tensor) -> Tensor:
        hidden = (self.first(x) + self.tied(x)) * self.frozen
        if bool(late.any()):
            hidden = hidden + self.late(hidden.tanh()).sum(1, keepdim=True)
        return (hidden - 1).square().mean()


X = torch.randn(12, 4, 3, generator=torch.Generator().manual_seed(3))


def batch(index: int, late_from: int) -> tuple[Tensor, Tensor]:
    return X[index], torch.full((4,), index >= late_from)


def optim(name: str, counts: int = 1) -> dict[str, Any]:
    return {"optimizer": {"type": name, **OPTIMIZERS[name]}, "accumulative_counts": counts}


class Training:
    """A `PartlyUsed` that a strategy trains."""

    def __init__(self, strategy: Strategy, name: str = "Adam", counts: int = 1, late_from: int = 4) -> None:
        torch.manual_seed(2)
        self.strategy, self._late_from = strategy, late_from
        self.model, self.optim_wrapper = strategy.prepare(PartlyUsed(), optim(name, counts))
        self.optim_wrapper.initialize_count_status(self.model, 0, 100)

    def run(self, start: int, stop: int) -> list[float]:
        step = self.model.train_step if hasattr(self.model, "train_step") else self._step
        return [float(step(batch(index, self._late_from), self.optim_wrapper)["loss"]) for index in range(start, stop)]

    def _step(self, data: Any, optim_wrapper: Any) -> dict[str, Tensor]:
        with optim_wrapper.optim_context(self.model):
            loss = self.model(*data)
        optim_wrapper.update_params(loss)
        return {"loss": loss.detach()}

    def state(self) -> dict[str, Any]:
        return {"model": self.strategy.model_state(), "optimizer": self.strategy.optim_state()}

    def everything(self) -> dict[str, Any]:
        """Return copies of all that a look might change; FSDP gives up its whole tensors for it."""
        reshard(self.model)
        parameters = unwrap_model(self.model).named_parameters()
        optimizers = [
            {str(index): dict(held) for index, held in enumerate(optimizer.state.values())}
            for optimizer in self.optim_wrapper.optimizers
        ]
        held = {
            "parameters": dict(parameters),
            "optimizers": optimizers,
            "groups": [
                {key: value for key, value in group.items() if key != "params"}
                for group in self.optim_wrapper.param_groups
            ],
            "random": torch.get_rng_state(),
        }
        gradients = {name: parameter.grad for name, parameter in held["parameters"].items()}
        with torch.no_grad():
            return copy.deepcopy(whole({**held, "gradients": gradients}))
