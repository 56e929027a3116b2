"""Models whose parameters are of a special kind, or are not reached by every loss."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.dist import get_rank
from lockstep.model import train_step
from lockstep.strategy import Strategy

from ..strategy.transformer import mean_over_ranks
from .own_steps import SGD, X, Y
from .training import whole

ADAMW = {"optimizer": {"type": "AdamW", "lr": 1e-2, "weight_decay": 0.1}}


class Base(nn.Module):
    """A regression; a subclass changes the inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 1)

    def changed(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.down(self.up(self.changed(x)).tanh()) - y).square().mean()


class Unused(Base):
    """Has a layer that it never calls."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(8, 8)


class Scalar(Base):
    """Has a parameter without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))

    def changed(self, x: Tensor) -> Tensor:
        return x * self.scale


class Double(Base):
    """Trains one layer in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.fine = nn.Linear(6, 6).double()

    def changed(self, x: Tensor) -> Tensor:
        return self.fine(x.double()).to(x.dtype)


class Half(Base):
    """Trains one layer in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.rough = nn.Linear(6, 6).bfloat16()


class FrozenKinds(Double):
    """Has frozen layers in float64 and bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.rough = nn.Linear(6, 6).bfloat16()
        self.fine.requires_grad_(False)
        self.rough.requires_grad_(False)

    def changed(self, x: Tensor) -> Tensor:
        return super().changed(x) + self.rough(x.bfloat16()).to(x.dtype)


class Complex(Base):
    """Has complex weights."""

    def __init__(self) -> None:
        super().__init__()
        self.phases = nn.Parameter(torch.ones(6, dtype=torch.cfloat))

    def changed(self, x: Tensor) -> Tensor:
        return (x * self.phases).abs()


class Sparse(Base):
    """Has an embedding with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(4, 6, sparse=True)

    def changed(self, x: Tensor) -> Tensor:
        return x + self.words(x[:, 0].gt(0).long())


class Branches(Base):
    """Goes another way on each rank, through layers of different shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.ways = nn.ModuleList([nn.Linear(6, 6), nn.Sequential(nn.Linear(6, 10), nn.Linear(10, 6))])

    def changed(self, x: Tensor) -> Tensor:
        return self.ways[get_rank() % 2](x)


class Orders(Base):
    """Goes through two layers in another order on each rank."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def changed(self, x: Tensor) -> Tensor:
        layers = [self.first, self.second]
        for layer in layers if get_rank() % 2 == 0 else layers[::-1]:
            x = layer(x).relu()
        return x


def train_base(
    kind: type[Base], strategy: Strategy, optim: Any = SGD, steps: int = 4
) -> tuple[list[float], dict[str, Tensor]]:
    """Return the losses of a few steps, as means over the ranks, and the model's state afterwards.

    `optim` is a config, or makes an optimizer for the model.
    """
    torch.manual_seed(3)
    core = kind()
    model, optim_wrapper = strategy.prepare(core, optim(core) if callable(optim) else optim)
    rank, ranks = strategy.data_shard
    batches = list(zip(X.split(4), Y.split(4), strict=True))[:steps]
    step = getattr(model, "train_step", partial(train_step, model))
    losses = [step((x[rank::ranks], y[rank::ranks]), optim_wrapper)["loss"].item() for x, y in batches]
    state = strategy.model_state()
    return mean_over_ranks(losses), {name: whole(value) for name, value in state.items()}
