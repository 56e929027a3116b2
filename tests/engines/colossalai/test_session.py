"""Loops written by hand under ColossalAI."""

from __future__ import annotations

import pytest
import torch

from lockstep.errors import ConfigError
from lockstep.testing import ranks

from ..own_loops import losses_by_hand, losses_of_two_models, losses_with_penalty

PLUGINS = [{"type": "colossalai", "stage": stage} for stage in (1, 2)]


@pytest.mark.parametrize("strategy", PLUGINS, ids=lambda strategy: f"zero{strategy['stage']}")
@ranks(1, 2)
def test_every_plugin_computes_what_torch_does(tmp_path, strategy):
    for number, options in enumerate(({}, {"accumulative_counts": 2, "clip_grad": {"max_norm": 0.1}})):
        expected, outputs = losses_by_hand(tmp_path / f"torch_{number}", None, **options)
        losses, others = losses_by_hand(tmp_path / f"engine_{number}", strategy, **options)
        assert losses == pytest.approx(expected, abs=1e-6)
        torch.testing.assert_close(others, outputs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("strategy", PLUGINS, ids=lambda strategy: f"zero{strategy['stage']}")
@ranks(2)
def test_a_penalty_on_gradients_is_what_torch_computes(tmp_path, strategy):
    expected = losses_with_penalty(tmp_path / "torch", None)
    assert losses_with_penalty(tmp_path / "engine", strategy) == pytest.approx(expected, abs=1e-6)


@ranks(2)
def test_several_optimizers_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="one optimizer"):
        losses_of_two_models(tmp_path, PLUGINS[0])
