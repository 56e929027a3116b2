"""A model's own `train_step` under each of ColossalAI's plugins, against one process."""

from __future__ import annotations

from typing import Any

import pytest

from lockstep.testing import ranks, run_ranks

from ..own_steps import (
    STEPS,
    ByParts,
    Distillation,
    Mixup,
    Outside,
    PartsBesides,
    Plain,
    RawBackward,
    alone,
    train_own,
)
from .training import PLUGINS, strategy_of


def train_all(plugin: str, kinds: list[type[Any]], counts: int = 1, **options: Any) -> list[list[float]]:
    return [train_own(kind, strategy_of(plugin, **options), counts) for kind in kinds]


@pytest.mark.parametrize("counts", [1, 2])
@pytest.mark.parametrize("plugin", PLUGINS)
def test_a_train_step_of_the_models_own_is_the_one_that_runs(plugin: str, counts: int):
    for losses, kind in zip(run_ranks(2, train_all, plugin, STEPS, counts)[0], STEPS, strict=True):
        assert losses == pytest.approx(alone(kind, counts), abs=1e-5, rel=0), kind


@pytest.mark.parametrize("counts", [1, 2])
@pytest.mark.parametrize("plugin", PLUGINS)
def test_a_loss_outside_of_the_model_counts_as_one_inside(plugin: str, counts: int):
    (losses,) = run_ranks(2, train_all, plugin, [Outside], counts)[0]
    assert losses == pytest.approx(alone(Plain, counts), abs=1e-5, rel=0)


def test_in_half_precision_its_parts_take_what_the_model_takes():
    kinds = [Mixup, ByParts, PartsBesides, Distillation]
    for losses, kind in zip(run_ranks(2, train_all, "zero1", kinds, precision="bf16")[0], kinds, strict=True):
        assert losses == pytest.approx(alone(kind), abs=0.02), kind


@ranks(2)
@pytest.mark.parametrize("plugin", ["zero1", "zero2"])
def test_going_round_the_optim_wrapper_is_refused(plugin: str):
    with pytest.raises(
        RuntimeError, match=r"`train_step` of RawBackward must run its backward pass by `optim_wrapper.update_params"
    ):
        train_own(RawBackward, strategy_of(plugin))
