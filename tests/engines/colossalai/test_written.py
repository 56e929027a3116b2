"""Weights that something else than the optimizer writes, under ColossalAI's plugins, against one process."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from torch import nn

from lockstep.errors import ConfigError, DivergenceError
from lockstep.strategy import Strategy, build_strategy
from lockstep.testing import ranks

from ..own_steps import SGD, Plain, X, Y
from ..written import (
    BY_RANK,
    check_that_forwards_are_followed,
    check_that_masters_keep_their_bits,
    check_that_writes_are_followed,
    nothing,
    train_written,
)

PLUGINS: dict[str, dict[str, Any]] = {
    "zero1": {"plugin": "lowlevel_zero", "stage": 1},
    "zero2": {"plugin": "lowlevel_zero", "stage": 2},
    "zero1-offload": {"plugin": "lowlevel_zero", "stage": 1, "cpu_offload": True},
}


def strategy_of(plugin: str, **options: Any) -> Strategy:
    return build_strategy({"type": "colossalai", **PLUGINS[plugin], **options})


@pytest.mark.parametrize("before", [False, True], ids=["after-each", "before"])
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("plugin", PLUGINS)
def test_what_is_written_into_the_weights_is_trained_on(plugin: str, size: int, before: bool):
    check_that_writes_are_followed(size, partial(strategy_of, plugin), before=before)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("plugin", ["zero1", "zero2"])
def test_a_forward_that_writes_the_same_on_all_ranks_is_followed(plugin: str, size: int):
    check_that_forwards_are_followed(size, partial(strategy_of, plugin))


@ranks(2)
@pytest.mark.parametrize("plugin", ["zero1", "zero2"])
def test_in_half_precision_masters_keep_their_bits_where_nothing_was_written(plugin: str):
    check_that_masters_keep_their_bits(strategy_of(plugin, precision="bf16"))


@ranks(2)
@pytest.mark.parametrize("plugin", ["zero1", "zero2"])
@pytest.mark.parametrize(("kind", "name"), BY_RANK)
def test_a_forward_that_writes_otherwise_on_each_rank_is_refused_at_the_first_update(kind: Any, name: str, plugin: str):
    says = rf"`{name}` .* rank 1 of 2 differs from the others before update 1\. Each rank has written"
    with pytest.raises(DivergenceError, match=says):
        train_written(kind, strategy_of(plugin), nothing)


@ranks(2)
@pytest.mark.parametrize("plugin", PLUGINS)
def test_an_embedding_with_a_maximum_norm_is_refused_at_once(plugin: str):
    with pytest.raises(ConfigError, match=r"`0\.max_norm` must be None .*, but is 1\.0"):
        strategy_of(plugin).prepare(nn.Sequential(nn.Embedding(5, 4, max_norm=1.0)), SGD)


@ranks(2)
def test_weights_of_another_dtype_are_refused_by_name():
    core = Plain()
    model, optim_wrapper = strategy_of("zero1").prepare(core, SGD)
    core.double()
    with pytest.raises(ConfigError, match=r"`backbone.weight.data` must keep its shape and dtype under ColossalAI"):
        model.train_step((X[:8].double(), Y[:8].double()), optim_wrapper)
