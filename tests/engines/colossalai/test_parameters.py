"""Parameters of special kinds, and such as are frozen, unfrozen or reached on some ranks only."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lockstep.errors import ConfigError
from lockstep.strategy import DDPStrategy
from lockstep.testing import ranks, run_ranks

from ..own_steps import SGD, X, Y
from ..parameters import (
    ADAMW,
    Base,
    Branches,
    Complex,
    Double,
    FrozenKinds,
    Half,
    Orders,
    Scalar,
    Sparse,
    Unused,
    train_base,
)
from .training import PLUGINS, strategy_of


def losses_of(kinds: list[type[Base]], plugin: str, optim: Any = SGD) -> list[list[float]]:
    return [train_base(kind, strategy_of(plugin), optim)[0] for kind in kinds]


@pytest.mark.parametrize("plugin", PLUGINS)
def test_scalars_and_frozen_parameters_of_any_dtype_are_right(plugin: str):
    kinds = [Scalar, FrozenKinds]
    expected = run_ranks(1, losses_of, kinds, "single")[0]
    for losses, alone in zip(run_ranks(2, losses_of, kinds, plugin)[0], expected, strict=True):
        assert losses == pytest.approx(alone, abs=1e-5)


@pytest.mark.parametrize("plugin", ["zero1", "zero2"])
def test_frozen_parameters_may_be_in_the_optimizer(plugin: str):
    expected = run_ranks(1, losses_of, [FrozenKinds], "single")[0][0]
    assert run_ranks(2, losses_of_object, plugin)[0] == pytest.approx(expected, abs=1e-5)


def losses_of_object(plugin: str) -> list[float]:
    return train_base(FrozenKinds, strategy_of(plugin), sgd_over_all)[0]


def sgd_over_all(model: FrozenKinds) -> torch.optim.Optimizer:
    rough = {id(parameter) for parameter in model.rough.parameters()}
    others = [parameter for parameter in model.parameters() if id(parameter) not in rough]
    return torch.optim.SGD([{"params": list(model.rough.parameters())}, {"params": others}], lr=0.2, momentum=0.9)


@ranks(2)
@pytest.mark.parametrize("plugin", ["zero1", "zero2"])
def test_what_would_be_trained_in_another_precision_or_can_not_be_sent_is_refused(plugin: str):
    for kind, name in ((Double, "fine.weight"), (Complex, "phases")):
        with pytest.raises(ConfigError, match=f"`{name}` must be float32 under ColossalAI's.*strategy 'ddp'"):
            train_base(kind, strategy_of(plugin))
    with pytest.raises(ConfigError, match=r"`rough.weight` must be float32 under.*with precision='bf16'"):
        train_base(Half, strategy_of(plugin))
    with pytest.raises(ConfigError, match=r"`words\.sparse` must be False under ColossalAI's"):
        train_base(Sparse, strategy_of(plugin))
    with pytest.raises(ConfigError, match=r"must update each number by itself.* is LBFGS"):
        train_base(Base, strategy_of(plugin), {"optimizer": {"type": "LBFGS"}})


@ranks(2)
@pytest.mark.parametrize("plugin", ["zero1", "zero2"])
def test_parameters_that_are_unfrozen_during_training_are_refused(plugin: str):
    model = Unused()
    model.extra.requires_grad_(False)
    wrapped, optim_wrapper = strategy_of(plugin).prepare(model, SGD)
    wrapped.train_step((X[:2], Y[:2]), optim_wrapper)
    model.extra.requires_grad_(True)
    with pytest.raises(
        ConfigError, match=r"under ColossalAI.* has changed: extra.weight, extra.bias .*strategy 'fsdp'"
    ):
        wrapped.train_step((X[:2], Y[:2]), optim_wrapper)


@pytest.mark.parametrize("plugin", ["zero1", "zero2"])
def test_zero_leaves_parameters_without_gradients_alone(plugin: str):
    moved = run_ranks(2, weights_of, Unused, plugin)[0] - run_ranks(1, weights_of, Unused, "single", 0)[0]
    assert moved.abs().max() == 0


def weights_of(kind: type[Base], plugin: str, steps: int = 4) -> torch.Tensor:
    return train_base(kind, strategy_of(plugin), ADAMW, steps)[1]["extra.weight"]


def test_ranks_may_go_different_ways_under_zero_1():
    kinds = [Branches, Orders]
    expected = run_ranks(2, losses_by_ddp, kinds)[0]
    for losses, by_ddp in zip(run_ranks(2, losses_of, kinds, "zero1")[0], expected, strict=True):
        assert losses == pytest.approx(by_ddp, abs=1e-6)


def losses_by_ddp(kinds: list[type[Base]]) -> list[list[float]]:
    return [train_base(kind, DDPStrategy(find_unused_parameters=True))[0] for kind in kinds]


@ranks(2)
@pytest.mark.parametrize("kind", [Branches, Orders])
def test_under_zero_2_they_are_told_to_go_the_same_way(kind: type[Base]):
    with pytest.raises(ConfigError, match=r"must reach the same parameters on every rank, in the same order.*stage=1"):
        train_base(kind, strategy_of("zero2"))
