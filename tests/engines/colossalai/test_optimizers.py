"""Optimizers that ColossalAI's plugins do not know."""

from __future__ import annotations

from typing import Any

import pytest

from lockstep.errors import ConfigError
from lockstep.strategy import build_strategy
from lockstep.testing import ranks, run_ranks

from ..optimizers import DerivedFromSigns, Signs, TrustRatio, train_by
from .test_written import strategy_of


def train_alone(kind: Any) -> list[float]:
    return train_by(kind, build_strategy("single"))


def train(kind: Any, plugin: str) -> list[float]:
    return train_by(kind, strategy_of(plugin))


@ranks(2)
@pytest.mark.parametrize("plugin", ["zero1", "zero2"])
def test_an_unknown_optimizer_is_refused_where_it_would_get_shards(plugin: str):
    for kind in (TrustRatio, DerivedFromSigns):
        message = rf"is {kind.__name__}, which is not known to do so.*or set `is_elementwise = True` on its class"
        with pytest.raises(ConfigError, match=message):
            train(kind, plugin)


@pytest.mark.parametrize(("kind", "plugin"), [(Signs, "zero1"), (Signs, "zero2")])
def test_it_trains_where_it_says_that_it_can(kind: type, plugin: str):
    expected = run_ranks(1, train_alone, kind)[0]
    assert run_ranks(2, train, kind, plugin)[0] == pytest.approx(expected, abs=1e-5, rel=0)
