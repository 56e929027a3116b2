"""Optimizers that DeepSpeed does not know."""

from __future__ import annotations

from typing import Any

import pytest

from lockstep.errors import ConfigError
from lockstep.strategy import build_strategy
from lockstep.testing import ranks, run_ranks

from ..optimizers import DerivedFromSigns, Signs, TrustRatio, train_by
from .training import strategy_of


def train_alone(kind: Any) -> list[float]:
    return train_by(kind, build_strategy("single"))


def train(kind: Any, stage: int) -> list[float]:
    return train_by(kind, strategy_of(f"zero{stage}"))


@ranks(2)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_an_unknown_optimizer_is_refused_where_it_would_get_shards(stage: int):
    for kind in (TrustRatio, DerivedFromSigns):
        with pytest.raises(ConfigError, match=rf"is {kind.__name__}, which is not known to do so"):
            train(kind, stage)


@pytest.mark.parametrize(("kind", "stage"), [(Signs, 1), (Signs, 2), (Signs, 3)])
def test_it_trains_where_it_says_that_it_can(kind: type, stage: int):
    expected = run_ranks(1, train_alone, kind)[0]
    assert run_ranks(2, train, kind, stage)[0] == pytest.approx(expected, abs=1e-5, rel=0)
