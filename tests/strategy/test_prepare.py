"""`Strategy.prepare`: a model from a config, and compilation."""

from __future__ import annotations

import torch
from torch import nn

from lockstep.strategy import SingleDeviceStrategy

SGD = {"optimizer": {"type": "SGD", "lr": 0.1}}


def test_a_model_may_be_a_config():
    cfg = {"type": nn.Linear, "in_features": 2, "out_features": 1}
    model, wrapper = SingleDeviceStrategy().prepare(cfg, optim_wrapper=SGD)
    assert isinstance(model, nn.Linear)
    assert wrapper.get_lr() == {"lr": [0.1]}


def test_a_model_is_compiled():
    model, wrapper = SingleDeviceStrategy().prepare(nn.Linear(2, 1), compile={"backend": "eager"})
    assert model._compiled_call_impl is not None
    assert wrapper is None
    assert model(torch.ones(3, 2)).shape == (3, 1)
