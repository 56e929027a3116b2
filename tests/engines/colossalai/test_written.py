"""Weights that something else than the optimizer writes, under ColossalAI's plugins, against one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lockstep.errors import ConfigError, DivergenceError
from lockstep.strategy import Strategy, build_strategy
from lockstep.testing import ranks, run_ranks

from ..own_steps import SGD, Plain, X, Y
from ..written import (
    BOUND,
    BY_RANK,
    WRITES,
    Initialises,
    Renormalises,
    nothing,
    train_written,
    trained_then_clamped,
    written_alone,
)

PLUGINS: dict[str, dict[str, Any]] = {
    "ddp": {"plugin": "ddp"},
    "zero1": {"plugin": "lowlevel_zero", "stage": 1},
    "zero2": {"plugin": "lowlevel_zero", "stage": 2},
    "zero1-offload": {"plugin": "lowlevel_zero", "stage": 1, "cpu_offload": True},
    "hybrid": {"plugin": "hybrid"},
}


def strategy_of(plugin: str, **options: Any) -> Strategy:
    return build_strategy({"type": "colossalai", **PLUGINS[plugin], **options})


def train_all(plugin: str, before: bool) -> list[list[float]]:
    return [train_written(Plain, strategy_of(plugin), write, before=before) for write in WRITES]


@pytest.mark.parametrize("before", [False, True], ids=["after-each", "before"])
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("plugin", PLUGINS)
def test_what_is_written_into_the_weights_is_trained_on(plugin: str, size: int, before: bool):
    for losses, write in zip(run_ranks(size, train_all, plugin, before)[0], WRITES, strict=True):
        assert losses == pytest.approx(written_alone(Plain, write, before), abs=1e-5, rel=0), write


def train_writing_forwards(plugin: str) -> list[list[float]]:
    return [train_written(kind, strategy_of(plugin), nothing) for kind in (Renormalises, Initialises)]


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("plugin", ["zero1", "zero2"])
def test_a_forward_that_writes_the_same_on_all_ranks_is_followed(plugin: str, size: int):
    for losses, kind in zip(
        run_ranks(size, train_writing_forwards, plugin)[0], (Renormalises, Initialises), strict=True
    ):
        assert losses == pytest.approx(written_alone(kind, nothing), abs=1e-5, rel=0), kind


@ranks(2)
@pytest.mark.parametrize(
    ("plugin", "options"), [("zero1", {}), ("zero2", {}), ("hybrid", {}), ("hybrid", {"zero_stage": 1})]
)
def test_in_half_precision_masters_keep_their_bits_where_nothing_was_written(plugin: str, options: dict):
    trained, clamped, after = trained_then_clamped(strategy_of(plugin, precision="bf16", **options))
    for name, master in trained.items():
        assert master.dtype == torch.float32
        bound = torch.tensor(BOUND).bfloat16()
        expected = torch.where(master.bfloat16().abs() > bound, master.sign() * bound, master)
        assert torch.equal(clamped[name], expected), name
        assert torch.equal(after[name], expected), name
    assert not torch.equal(trained["backbone.weight"], clamped["backbone.weight"])


@ranks(2)
@pytest.mark.parametrize("plugin", ["ddp", "zero1", "zero2", "hybrid"])
@pytest.mark.parametrize(("kind", "name"), BY_RANK)
def test_a_forward_that_writes_otherwise_on_each_rank_is_refused_at_the_first_update(kind: Any, name: str, plugin: str):
    when = "after 1 update" if plugin == "ddp" else "before update 1"
    with pytest.raises(
        DivergenceError, match=rf"`{name}` .* rank 1 of 2 differs from the others {when}\. Each rank has written"
    ):
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
