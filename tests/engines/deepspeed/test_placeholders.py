"""Parameters at stage 3 of ZeRO, where each rank has its share of them between forward passes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.nn.utils.parametrizations import weight_norm

from lockstep.dist import get_rank
from lockstep.engines import load_engine
from lockstep.errors import ConfigError, PeerError
from lockstep.testing import ranks, run_ranks

from ..own_steps import SGD, Plain, X, Y
from ..written import clamp, nothing, train_written, written_alone
from .training import strategy_of

BATCH = X[:8], Y[:8]


class Penalized(Plain):
    """Keeps a weight in a list, for a penalty that empties would make 0."""

    def __init__(self) -> None:
        super().__init__()
        self.penalized = [self.backbone.weight]

    def forward(self, x: Tensor, y: Tensor | None = None, mode: str = "tensor") -> Any:
        found = super().forward(x, y, mode)
        if mode == "loss":
            found["loss"] = found["loss"] + sum(own.square().sum() for own in self.penalized)
        return found


class Tied(Penalized):
    """Uses the listed weight in a layer."""

    def forward(self, x: Tensor, y: Tensor | None = None, mode: str = "tensor") -> Any:
        return Plain.forward(self, linear(linear(x, self.penalized[0]), self.penalized[0].T), y, mode)


class Demanding(Plain):
    """Has modules that use parameters of others, in ways that stage 3 supports."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.memory = nn.LSTM(6, 6, batch_first=True)
        self.turn = weight_norm(nn.Linear(6, 6))

    def forward(self, x: Tensor, y: Tensor | None = None, mode: str = "tensor") -> Any:
        assert next(self.parameters()).dtype == torch.float32
        x = self.turn(x)[:, None]
        x = x + self.attention(x, x, x)[0] + self.memory(x)[0]
        return super().forward(x[:, 0], y, mode)


@ranks(1, 2)
@pytest.mark.parametrize("kind", [Penalized, Tied])
def test_a_parameter_that_is_used_outside_of_its_module_is_refused_by_name(kind: type[Plain]):
    model, optim_wrapper = strategy_of("zero3").prepare(kind(), SGD)
    message = f"`forward` of {kind.__name__} must leave 'backbone.weight' to the module that holds it, but used it in `"
    with pytest.raises(ConfigError, match=message):
        model.train_step(BATCH, optim_wrapper)


def test_modules_that_use_parameters_of_others_train_as_in_one_process():
    losses = run_ranks(2, train_at_stage_3, Demanding, nothing)[0]
    assert losses == pytest.approx(written_alone(Demanding, nothing), abs=1e-5, rel=0)


def train_at_stage_3(kind: type[Plain], write: Any) -> list[float]:
    return train_written(kind, strategy_of("zero3"), write)


@ranks(1, 2)
@pytest.mark.parametrize("then", ["train", "predict"])
def test_a_write_to_a_parameter_that_is_not_gathered_is_refused_by_name(then: str):
    core = Plain()
    model, optim_wrapper = strategy_of("zero3").prepare(core, SGD)
    model.train_step(BATCH, optim_wrapper)
    clamp(core)
    with pytest.raises(ConfigError, match=r"GatheredParameters.*but backbone.weight, .* were written outside of it"):
        model.train_step(BATCH, optim_wrapper) if then == "train" else model.val_step(BATCH)


def gathered_clamp(core: Plain) -> None:
    with load_engine("deepspeed").zero.GatheredParameters(list(core.parameters()), modifier_rank=0):
        clamp(core)


def test_a_write_to_gathered_parameters_is_trained_on():
    losses = run_ranks(2, train_at_stage_3, Plain, gathered_clamp)[0]
    assert losses == pytest.approx(written_alone(Plain, clamp), abs=1e-5, rel=0)


@ranks(2)
@pytest.mark.parametrize("stage", [1, 3])
def test_an_embedding_that_writes_its_weight_in_the_forward_pass_is_refused(stage: int):
    core = nn.Sequential(nn.Embedding(4, 6, max_norm=1.0), nn.Linear(6, 1))
    with pytest.raises(ConfigError, match=r"`0.max_norm` must be None under DeepSpeed, where each rank has its own"):
        strategy_of(f"zero{stage}").prepare(core, SGD)


class FailsLast(Plain):
    """Fails on the second rank, when its last layer has run."""

    def forward(self, x: Tensor, y: Tensor | None = None, mode: str = "tensor") -> Any:
        found = super().forward(x, y, mode)
        if get_rank() == 1:
            raise KeyError("of its own")
        return found


@ranks(2)
def test_ranks_learn_of_one_that_fails_when_its_layers_have_run():
    model, optim_wrapper = strategy_of("zero3").prepare(FailsLast(), SGD)
    error, says = (KeyError, "of its own") if get_rank() == 1 else (PeerError, "rank 1 failed in the forward pass")
    with pytest.raises(error, match=says):
        model.train_step(BATCH, optim_wrapper)
