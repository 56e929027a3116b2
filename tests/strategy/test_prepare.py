"""`Strategy.prepare` as MMEngine publishes it, with schedules and compilation."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lockstep.errors import ConfigError
from lockstep.strategy import SingleDeviceStrategy, build_strategy
from lockstep.testing import ranks

SGD = {"optimizer": {"type": "SGD", "lr": 0.1}}
LINEAR = {"type": "LinearLR", "start_factor": 0.5, "by_epoch": False}


def test_a_model_may_be_a_config_and_schedules_come_back():
    cfg = {"type": nn.Linear, "in_features": 2, "out_features": 1}
    model, wrapper, (schedule,) = SingleDeviceStrategy().prepare(
        cfg, optim_wrapper=SGD, param_scheduler=LINEAR, dispatch_kwargs={"max_iters": 11, "epoch_length": 5}
    )
    assert isinstance(model, nn.Linear)
    assert wrapper.get_lr() == {"lr": [0.05]}
    for _ in range(10):
        schedule.step()
    assert wrapper.get_lr() == {"lr": [pytest.approx(0.1)]}


def test_a_model_is_compiled():
    model, wrapper = SingleDeviceStrategy().prepare(nn.Linear(2, 1), compile={"backend": "eager"})
    assert model._compiled_call_impl is not None
    assert wrapper is None
    assert model(torch.ones(3, 2)).shape == (3, 1)


@ranks(2)
@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_schedules_are_those_of_the_optimizer_that_trains(name):
    model, wrapper, (schedule,) = build_strategy(name).prepare(
        nn.Linear(2, 1), SGD, param_scheduler=[LINEAR], dispatch_kwargs={"max_iters": 3}
    )
    wrapper.update_params(model(torch.ones(3, 2)).sum())
    schedule.step()
    assert wrapper.optimizer.param_groups[0]["lr"] == pytest.approx(0.075)


def test_schedules_without_one_optimizer_are_refused():
    with pytest.raises(ConfigError, match="`param_scheduler` must come with one optimizer, but comes with 0"):
        SingleDeviceStrategy().prepare(nn.Linear(2, 1), param_scheduler=LINEAR)
    parts = nn.ModuleDict({"one": nn.Linear(2, 1), "other": nn.Linear(2, 1)})
    with pytest.raises(ConfigError, match="comes with 2"):
        SingleDeviceStrategy().prepare(parts, {"one": SGD, "other": SGD}, param_scheduler=LINEAR)
