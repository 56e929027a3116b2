"""Weights that something else than the optimizer writes, under each stage of ZeRO, against one process."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch

from lockstep.engines import load_engine
from lockstep.errors import ConfigError, DivergenceError
from lockstep.testing import ranks

from ..own_steps import SGD, Plain, X, Y
from ..training import whole
from ..written import (
    BY_RANK,
    BoundsOnRank1,
    check_that_forwards_are_followed,
    check_that_masters_keep_their_bits,
    check_that_writes_are_followed,
    nothing,
    train_written,
)
from .training import strategy_of


@pytest.mark.parametrize("before", [False, True], ids=["after-each", "before"])
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(("stage", "offload"), [(1, False), (2, False), (1, True), (2, True)])
def test_what_is_written_into_the_weights_is_trained_on(stage: int, offload: bool, size: int, before: bool):
    options = {"offload": True} if offload else {}
    check_that_writes_are_followed(size, partial(strategy_of, f"zero{stage}", **options), before=before)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("stage", [1, 2])
def test_a_forward_that_writes_the_same_on_all_ranks_is_followed(stage: int, size: int):
    check_that_forwards_are_followed(size, partial(strategy_of, f"zero{stage}"))


@ranks(2)
@pytest.mark.parametrize("stage", [1, 2])
def test_in_half_precision_masters_keep_their_bits_where_nothing_was_written(stage: int):
    check_that_masters_keep_their_bits(strategy_of(f"zero{stage}", bf16=True))


@ranks(2)
@pytest.mark.parametrize("options", [{}, {"bf16": True}, {"offload": True}], ids=["fp32", "bf16", "offload"])
def test_at_stage_3_parameters_are_written_while_they_are_gathered(options: dict):
    torch.manual_seed(3)
    strategy = strategy_of("zero3", **options)
    core = Plain()
    model, optim_wrapper = strategy.prepare(core, SGD)
    model.train_step((X[:8], Y[:8]), optim_wrapper)
    with load_engine("deepspeed").zero.GatheredParameters(core.backbone.weight, modifier_rank=0):
        core.backbone.weight.data.fill_(0.5)
    assert whole(strategy.model_state())["backbone.weight"].eq(0.5).all()
    optim_wrapper.param_groups[0]["lr"] = 0.0
    model.train_step((X[:8], Y[:8]), optim_wrapper)
    assert whole(strategy.model_state())["backbone.weight"].eq(0.5).all()


@ranks(2)
@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize(("kind", "name"), BY_RANK)
def test_a_forward_that_writes_otherwise_on_each_rank_is_refused_before_the_update(kind: Any, name: str, stage: int):
    with pytest.raises(
        DivergenceError,
        match=rf"`{name}` .* rank 1 of 2 differs from the others before update 1\. Each rank has written",
    ):
        train_written(kind, strategy_of(f"zero{stage}"), nothing)


@ranks(2)
@pytest.mark.parametrize(("kind", "name"), BY_RANK)
def test_at_stage_3_a_forward_that_writes_is_refused_on_every_rank(kind: Any, name: str):
    where = "ranks 0, 1" if name == "scale" else "rank 1"
    with pytest.raises(ConfigError, match=rf"`{name}` must not be written in the forward pass .* written on {where}\."):
        train_written(kind, strategy_of("zero3"), nothing)


@ranks(2)
def test_at_stage_3_a_validation_before_the_training_does_not_use_up_its_checks():
    model, optim_wrapper = strategy_of("zero3").prepare(BoundsOnRank1(), SGD)
    for _ in range(3):
        with torch.no_grad(), model.evaluation_context():
            model(X[:8])
    with pytest.raises(ConfigError, match=r"`backbone.weight` must not be written in the forward pass .* on rank 1\."):
        model.train_step((X[:8], Y[:8]), optim_wrapper)


@ranks(2)
def test_weights_of_another_shape_are_refused_by_name():
    core = Plain()
    model, optim_wrapper = strategy_of("zero1").prepare(core, SGD)
    core.head.weight.data = torch.zeros(1, 8).double()
    core.double()
    # After an engine with `torch_autocast` in this process, DeepSpeed 0.19 ends first, for want of a bucket.
    with (
        patch("deepspeed.runtime.torch_autocast.TORCH_AUTOCAST_INITIALIZED", new=False),
        pytest.raises(ConfigError, match=r"`backbone.weight.data` must keep its shape and dtype under DeepSpeed"),
    ):
        model.train_step((X[:8].double(), Y[:8].double()), optim_wrapper)
