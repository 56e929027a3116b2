"""Models whose training steps are their own, as users of MMEngine write them."""

from __future__ import annotations

from copy import deepcopy
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.model import BaseModel, OutsideLoss
from lockstep.strategy import Strategy, build_strategy
from lockstep.testing import run_ranks

from ..strategy.transformer import mean_over_ranks

WINDOWS, SAMPLES = 4, 8
X = torch.randn(WINDOWS * SAMPLES, 6, generator=torch.Generator().manual_seed(1))
Y = X.sum(1, keepdim=True).sin()
# An update in proportion to the gradients, so that a wrong factor shows.
SGD = {"optimizer": {"type": "SGD", "lr": 0.2, "momentum": 0.9}}


class Plain(BaseModel):
    """Two layers, whose step is still that of `BaseModel`."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.head = nn.Linear(6, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor, y: Tensor | None = None, mode: str = "tensor") -> Any:
        out = self.head(self.backbone(x).tanh())
        return {"loss": (out - y).square().mean()} if mode == "loss" and y is not None else out


class Outside(Plain):
    """Returns outputs; its loss is computed outside."""

    def __init__(self) -> None:
        super().__init__()
        OutsideLoss(nn.MSELoss()).attach(self)

    def forward(self, x: Tensor, mode: str = "tensor") -> Any:
        return super().forward(x)


class Mixup(Plain):
    """Calls itself on other inputs."""

    def train_step(self, data: Any, optim_wrapper: Any) -> dict[str, Tensor]:
        x, y = self.data_preprocessor(data, True)
        with optim_wrapper.optim_context(self):
            losses = self(0.7 * x + 0.3 * x.flip(1), y, mode="loss")
        loss, logged = self.parse_losses(losses)
        optim_wrapper.update_params(loss)
        return logged


class ByForward(Mixup):
    """Calls `forward` instead of itself."""

    def train_step(self, data: Any, optim_wrapper: Any) -> dict[str, Tensor]:
        x, y = data
        loss = (self.forward(x) - y).square().mean()
        optim_wrapper.update_params(loss)
        return {"loss": loss.detach()}


class Inherited(Plain):
    """Changes the batch, and leaves the rest to `BaseModel`."""

    def train_step(self, data: Any, optim_wrapper: Any) -> dict[str, Tensor]:
        x, y = data
        return super().train_step((x.flip(1), y), optim_wrapper)


class Penalty(Plain):
    """Adds something to the loss after the forward pass."""

    def train_step(self, data: Any, optim_wrapper: Any) -> dict[str, Tensor]:
        with optim_wrapper.optim_context(self):
            loss = self(*data, mode="loss")["loss"]
        loss = loss + 0.1 * sum(parameter.float().square().sum() for parameter in self.head.parameters())
        optim_wrapper.update_params(loss)
        return {"loss": loss.detach()}


class TwoForwards(Plain):
    """Adds the losses of two forward passes."""

    def train_step(self, data: Any, optim_wrapper: Any) -> dict[str, Tensor]:
        x, y = data
        with optim_wrapper.optim_context(self):
            loss = self(x, y, mode="loss")["loss"] + self(x.flip(1), y, mode="loss")["loss"]
        optim_wrapper.update_params(loss)
        return {"loss": loss.detach()}


class TwoBackwards(Plain):
    """Makes two forward and backward passes; with `accumulative_counts=2` one update, else two."""

    def train_step(self, data: Any, optim_wrapper: Any) -> dict[str, Tensor]:
        x, y = data
        total = torch.zeros(())
        for inputs in (x, x.flip(1)):
            with optim_wrapper.optim_context(self):
                loss = self(inputs, y, mode="loss")["loss"]
            optim_wrapper.update_params(loss)
            total = total + loss.detach()
        return {"loss": total}


class ByHand(Plain):
    """Scales, goes back and updates by hand."""

    def train_step(self, data: Any, optim_wrapper: Any) -> dict[str, Tensor]:
        with optim_wrapper.optim_context(self):
            loss = self(*data, mode="loss")["loss"]
        optim_wrapper.backward(optim_wrapper.scale_loss(loss))
        if optim_wrapper.should_update():
            optim_wrapper.step()
            optim_wrapper.zero_grad()
        return {"loss": loss.detach()}


class ByParts(Plain):
    """Calls its parts, and never itself."""

    def val_step(self, data: Any) -> Tensor:
        return self.head(self.backbone(data[0]).tanh())

    def train_step(self, data: Any, optim_wrapper: Any) -> dict[str, Tensor]:
        x, y = data
        with optim_wrapper.optim_context(self):
            loss = (self.head(self.backbone(x).tanh()) - y).square().mean()
        optim_wrapper.update_params(loss)
        return {"loss": loss.detach()}


class PartsBesides(Plain):
    """Calls itself, and a part of itself once more."""

    def train_step(self, data: Any, optim_wrapper: Any) -> dict[str, Tensor]:
        x, y = data
        with optim_wrapper.optim_context(self):
            loss = self(x, y, mode="loss")["loss"] + self.backbone(x).square().mean()
        optim_wrapper.update_params(loss)
        return {"loss": loss.detach()}


class Distillation(Plain):
    """Learns from a frozen average of its own backbone, which each step moves on."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = deepcopy(self.backbone).requires_grad_(False)

    def train_step(self, data: Any, optim_wrapper: Any) -> dict[str, Tensor]:
        x, y = data
        with torch.no_grad():
            wanted = self.teacher(x)
        with optim_wrapper.optim_context(self):
            loss = self(x, y, mode="loss")["loss"] + (self.backbone(x) - wanted).square().mean()
        optim_wrapper.update_params(loss)
        with torch.no_grad():
            for old, new in zip(self.teacher.parameters(), self.backbone.parameters(), strict=True):
                old.lerp_(new, 0.5)
        return {"loss": loss.detach()}


class RawBackward(Plain):
    """Goes round the optim wrapper."""

    def train_step(self, data: Any, optim_wrapper: Any) -> dict[str, Tensor]:
        loss = self(*data, mode="loss")["loss"]
        loss.backward()
        optim_wrapper.optimizer.step()
        optim_wrapper.optimizer.zero_grad()
        return {"loss": loss.detach()}


class RawThenStep(Plain):
    """Goes back by itself, then updates by the optim wrapper."""

    def train_step(self, data: Any, optim_wrapper: Any) -> dict[str, Tensor]:
        loss = self(*data, mode="loss")["loss"]
        loss.backward()
        optim_wrapper.step()
        optim_wrapper.zero_grad()
        return {"loss": loss.detach()}


STEPS = (
    Mixup, ByForward, Inherited, TwoForwards, TwoBackwards, ByHand, ByParts, PartsBesides, Penalty, Distillation,
)  # fmt: skip
# What these do with parts of parameters can't be right.
OF_WHOLE_PARAMETERS = (Penalty, Distillation)


def train_own(kind: type[Plain], strategy: Strategy, counts: int = 1, updates: int = 4) -> list[float]:
    """Return the losses of a few steps, as means over the ranks."""
    torch.manual_seed(3)
    model, optim_wrapper = strategy.prepare(kind(), {**SGD, "accumulative_counts": counts})
    rank, ranks = strategy.data_shard
    batches = list(zip(X.split(SAMPLES), Y.split(SAMPLES), strict=True)) * 2
    losses = [
        model.train_step((x[rank::ranks], y[rank::ranks]), optim_wrapper)["loss"].item()
        for x, y in batches[: updates * counts]
    ]
    return mean_over_ranks(losses)


@cache
def alone(kind: type[Plain], counts: int = 1) -> list[float]:
    """Return the losses of one process."""
    losses: list[float] = run_ranks(1, _train_alone, kind, counts)[0]
    return losses


def _train_alone(kind: type[Plain], counts: int) -> list[float]:
    return train_own(kind, build_strategy("single"), counts)
