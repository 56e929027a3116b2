"""Loops written by hand under ColossalAI."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification

from lockstep import Session
from lockstep.errors import ConfigError
from lockstep.testing import ranks

from ..own_loops import losses_by_hand, losses_of_two_models, losses_with_penalty

PLUGINS = [{"type": "colossalai", "plugin": plugin} for plugin in ("torch_ddp", "low_level_zero", "hybrid")]


@pytest.mark.parametrize("strategy", PLUGINS, ids=lambda strategy: strategy["plugin"])
@ranks(1, 2)
def test_every_plugin_computes_what_torch_does(tmp_path, strategy):
    for number, options in enumerate(({}, {"accumulative_counts": 2, "clip_grad": {"max_norm": 0.1}})):
        expected, outputs = losses_by_hand(tmp_path / f"torch_{number}", None, **options)
        losses, others = losses_by_hand(tmp_path / f"engine_{number}", strategy, **options)
        assert losses == pytest.approx(expected, abs=1e-6)
        torch.testing.assert_close(others, outputs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("strategy", PLUGINS, ids=lambda strategy: strategy["plugin"])
@ranks(2)
def test_a_penalty_on_gradients_is_what_torch_computes(tmp_path, strategy):
    expected = losses_with_penalty(tmp_path / "torch", None)
    assert losses_with_penalty(tmp_path / "engine", strategy) == pytest.approx(expected, abs=1e-6)


@ranks(2)
def test_several_optimizers_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="one optimizer"):
        losses_of_two_models(tmp_path, PLUGINS[1])


@ranks(2)
def test_a_pipeline_is_refused(tmp_path):
    shape = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    model = BertForSequenceClassification(BertConfig(vocab_size=20, **shape))
    session = Session(tmp_path, strategy={"type": "colossalai", "plugin": "hybrid", "pp_size": 2}, log_level="ERROR")
    data = [{"input_ids": torch.arange(4), "labels": torch.tensor(0)}] * 8
    with pytest.raises(ConfigError, match=r"or is trained by a Session\. Move what it does"):
        session.prepare(model, torch.optim.AdamW(model.parameters()), DataLoader(data, batch_size=4))
