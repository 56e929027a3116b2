"""Several backward passes before an update, and changed gradients, under each stage of ZeRO."""

from __future__ import annotations

from typing import Any

import pytest

from lockstep.errors import ConfigError
from lockstep.testing import ranks, run_ranks

from ..by_hand import (
    ClearsGradients,
    ClipsByHand,
    ClipsInWindow,
    DropsGradient,
    DropsInWindow,
    SeveralBackwards,
    require_refused_in_window,
)
from ..own_steps import alone, train_own
from .training import Training, strategy_of


def train(kind: type[Any], stage: int, options: dict[str, Any]) -> list[float]:
    return train_own(kind, strategy_of(f"zero{stage}", **options))


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("options", [{}, {"offload": True}], ids="-".join)
def test_at_stage_3_the_gradients_of_several_backward_passes_add_up(options: dict, size: int):
    losses = run_ranks(size, train, SeveralBackwards, 3, options)[0]
    assert losses == pytest.approx(alone(SeveralBackwards), abs=1e-5, rel=0)


@pytest.mark.parametrize("accumulates_in", ["bf16", "fp32"])
def test_they_add_up_in_half_precision(accumulates_in: str):
    options = {"bf16": True, "data_types": {"grad_accum_dtype": accumulates_in}}
    losses = run_ranks(2, train, SeveralBackwards, 3, options)[0]
    assert losses == pytest.approx(alone(SeveralBackwards), rel=0.02)


@ranks(1, 2)
@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("options", [{}, {"offload": True}, {"bf16": True}], ids="-".join)
def test_at_stages_1_and_2_a_second_backward_pass_is_refused(stage: int, options: dict):
    with pytest.raises(ConfigError, match=r"`backward` must be called once before `step` under DeepSpeed's stages 1"):
        train(SeveralBackwards, stage, options)


@ranks(2)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_gradient_that_is_dropped_or_used_is_named(stage: int):
    with pytest.raises(ConfigError, match=r"was set: head\.weight .*use strategy 'ddp' or 'fsdp'"):
        train(DropsGradient, stage, {})
    with pytest.raises(ConfigError, match=r"`backbone\.weight\.grad` must not be used between .*Clip by `clip_grad`"):
        train(ClipsByHand, stage, {})
    with pytest.raises(ConfigError, match=r"`zero_grad` must not be called between a backward pass and the update"):
        train(ClearsGradients, stage, {})


@ranks(1)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_training_does_not_begin_with_the_gradients_of_one_that_ended_inside_a_window(stage: int):
    training = Training(f"zero{stage}", {"optimizer": {"type": "SGD", "lr": 0.1}, "accumulative_counts": 2})
    training.run(0, 1)
    with pytest.raises(ConfigError, match=r"ZeRO, which would keep the gradients .*, and no training must begin there"):
        training.optim_wrapper.initialize_count_status(training.model, 0, 4)


@ranks(2)
@pytest.mark.parametrize("stage", [2, 3])  # stage 1 keeps them in `grad`, as torch does
def test_a_gradient_that_is_dropped_or_used_within_a_window_is_named(stage: int):
    with pytest.raises(ConfigError, match=r"was set: head\.weight .*use strategy 'ddp' or 'fsdp'"):
        require_refused_in_window(strategy_of(f"zero{stage}"), DropsInWindow)
    with pytest.raises(ConfigError, match=r"`backbone\.weight\.grad` must not be used between .*Clip by `clip_grad`"):
        require_refused_in_window(strategy_of(f"zero{stage}"), ClipsInWindow)
