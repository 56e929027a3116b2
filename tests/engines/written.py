"""Weights that something else than the optimizer writes: a clamp, a normalisation, a hook."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import normalize

from lockstep.dist import get_rank
from lockstep.strategy import Strategy, build_strategy
from lockstep.testing import run_ranks

from ..strategy.transformer import mean_over_ranks
from .own_steps import SGD, Plain, X, Y
from .training import whole

Write = Callable[[Plain], None]
BOUND = 0.2


def clamp_data(model: Plain) -> None:
    for parameter in model.parameters():
        parameter.data.clamp_(-BOUND, BOUND)


@torch.no_grad()
def clamp(model: Plain) -> None:
    for parameter in model.parameters():
        parameter.clamp_(-BOUND, BOUND)


def replace_data(model: Plain) -> None:
    model.head.weight.data = normalize(model.head.weight.data)


@torch.no_grad()
def normalise(model: Plain) -> None:
    model.head.weight.copy_(normalize(model.head.weight))


WRITES = (clamp_data, clamp, replace_data, normalise)


class Renormalises(Plain):
    """Replaces a weight in each forward pass by one of a bounded norm."""

    def forward(self, x: Any, y: Any = None, mode: str = "tensor") -> Any:
        self.backbone.weight.data = torch.renorm(self.backbone.weight.data, 2, 0, 0.3)
        return super().forward(x, y, mode)


class Initialises(Plain):
    """Sets a weight from its first batch, which is the same on all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6))
        self.register_buffer("is_set", torch.tensor(False))

    @torch.no_grad()
    def set_from(self, x: Any) -> None:
        if not self.is_set:
            self.scale.copy_(1 / X[:8].std(0))
            self.is_set.fill_(True)

    def forward(self, x: Any, y: Any = None, mode: str = "tensor") -> Any:
        self.set_from(x)
        return super().forward(x * self.scale, y, mode)


class InitialisesByRank(Initialises):
    """Sets a weight from its first batch, as ActNorm does."""

    @torch.no_grad()
    def set_from(self, x: Any) -> None:
        if not self.is_set:
            self.scale.copy_(1 / x.std(0))
            self.is_set.fill_(True)


class BoundedOnRank1(nn.Linear):
    """Bounds its weights in each forward pass, on one rank."""

    def forward(self, input: Any) -> Any:  # noqa: A002 - torch's name
        if get_rank() == 1:
            self.weight.data.clamp_(-BOUND / 2, BOUND / 2)
        return super().forward(input)


class BoundsOnRank1(Plain):
    """Has a layer that writes on one rank."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = BoundedOnRank1(6, 8)


BY_RANK = ((InitialisesByRank, "scale"), (BoundsOnRank1, "backbone.weight"))


def nothing(_: Plain) -> None:
    """Write nothing."""


def train_written(
    kind: type[Plain], strategy: Strategy, write: Write, *, before: bool = False, optim: Any = SGD
) -> list[float]:
    """Return the losses of a few steps, as means over the ranks, with `write` before the first or after each."""
    torch.manual_seed(3)
    core = kind()
    model, optim_wrapper = strategy.prepare(core, optim)
    rank, ranks = strategy.data_shard
    if before:
        write(core)
    losses = []
    for x, y in list(zip(X.split(8), Y.split(8), strict=True)) * 2:
        losses.append(model.train_step((x[rank::ranks], y[rank::ranks]), optim_wrapper)["loss"].item())
        if not before:
            write(core)
    return mean_over_ranks(losses)


@cache
def written_alone(kind: type[Plain], write: Write, before: bool = False) -> list[float]:
    """Return the losses of one process."""
    losses: list[float] = run_ranks(1, _train_alone, kind, write, before)[0]
    return losses


def _train_alone(kind: type[Plain], write: Write, before: bool) -> list[float]:
    return train_written(kind, build_strategy("single"), write, before=before)


def _trained_then_clamped(strategy: Strategy) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Return the model's states after two steps, after a clamp, and after an update that changes nothing."""
    torch.manual_seed(3)
    core = Plain()
    model, optim_wrapper = strategy.prepare(core, SGD)
    batch = X[:8], Y[:8]
    for _ in range(2):
        model.train_step(batch, optim_wrapper)
    states = [whole(strategy.model_state())]
    clamp_data(core)
    states.append(whole(strategy.model_state()))
    optim_wrapper.param_groups[0]["lr"] = 0.0
    model.train_step(batch, optim_wrapper)
    states.append(whole(strategy.model_state()))
    return states[0], states[1], states[2]


def _train_all(make: Callable[[], Strategy], before: bool) -> list[list[float]]:
    return [train_written(Plain, make(), write, before=before) for write in WRITES]


def check_that_writes_are_followed(size: int, make: Callable[[], Strategy], *, before: bool) -> None:
    """Check that what is written into the weights between steps is trained on, as in one process."""
    for losses, write in zip(run_ranks(size, _train_all, make, before)[0], WRITES, strict=True):
        assert losses == pytest.approx(written_alone(Plain, write, before), abs=1e-5, rel=0), write


def _train_writing_forwards(make: Callable[[], Strategy]) -> list[list[float]]:
    return [train_written(kind, make(), nothing) for kind in (Renormalises, Initialises)]


def check_that_forwards_are_followed(size: int, make: Callable[[], Strategy]) -> None:
    """Check the same of what forward passes write, alike on all ranks."""
    for losses, kind in zip(
        run_ranks(size, _train_writing_forwards, make)[0], (Renormalises, Initialises), strict=True
    ):
        assert losses == pytest.approx(written_alone(kind, nothing), abs=1e-5, rel=0), kind


def check_that_masters_keep_their_bits(strategy: Strategy) -> None:
    """Check that in half precision only those elements of the float32 weights change that were written."""
    trained, clamped, after = _trained_then_clamped(strategy)
    for name, master in trained.items():
        assert master.dtype == torch.float32
        bound = torch.tensor(BOUND).bfloat16()
        expected = torch.where(master.bfloat16().abs() > bound, master.sign() * bound, master)
        assert torch.equal(clamped[name], expected), name
        assert torch.equal(after[name], expected), name
    assert not torch.equal(trained["backbone.weight"], clamped["backbone.weight"])
