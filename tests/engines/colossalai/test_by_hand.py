"""Several backward passes before an update, and changed gradients, under ColossalAI's plugins."""

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
from .test_written import PLUGINS, strategy_of


def train(kind: type[Any], plugin: str) -> list[float]:
    return train_own(kind, strategy_of(plugin))


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("plugin", PLUGINS)
def test_the_gradients_of_several_backward_passes_add_up(plugin: str, size: int):
    assert run_ranks(size, train, SeveralBackwards, plugin)[0] == pytest.approx(alone(SeveralBackwards), abs=1e-5)


@ranks(2)
@pytest.mark.parametrize("plugin", ["zero1", "zero2"])
def test_a_gradient_that_is_dropped_or_used_is_named(plugin: str):
    with pytest.raises(ConfigError, match=r"was set: head\.weight .*use strategy 'ddp' or 'fsdp'"):
        train(DropsGradient, plugin)
    with pytest.raises(ConfigError, match=r"`backbone\.weight\.grad` must not be used between .*Clip by `clip_grad`"):
        train(ClipsByHand, plugin)


@pytest.mark.parametrize("kind", [ClearsGradients])
@pytest.mark.parametrize("plugin", ["zero1", "zero2"])
def test_gradients_can_be_cleared_before_an_update(plugin: str, kind: type):
    assert run_ranks(2, train, kind, plugin)[0] == pytest.approx(alone(kind), abs=1e-5, rel=0)


@ranks(2)
@pytest.mark.parametrize("plugin", ["zero2"])  # zero1 keeps them in `grad`, as torch does
def test_a_gradient_that_is_dropped_or_used_within_a_window_is_named(plugin: str):
    with pytest.raises(ConfigError, match=r"was set: head\.weight .*use strategy 'ddp' or 'fsdp'"):
        require_refused_in_window(strategy_of(plugin), DropsInWindow)
    with pytest.raises(ConfigError, match=r"`backbone\.weight\.grad` must not be used between .*Clip by `clip_grad`"):
        require_refused_in_window(strategy_of(plugin), ClipsInWindow)
