"""Parameters that have no shape or no values yet are named before anything is distributed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lockstep.dist import get_world_size
from lockstep.errors import ConfigError
from lockstep.strategy import build_strategy
from lockstep.testing import ranks


@ranks(2)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_lazy_parameter_is_refused_and_may_be_given_its_shape(strategy: str):
    net = nn.Sequential(nn.Linear(3, 3), nn.LazyLinear(2))
    with pytest.raises((RuntimeError, ValueError), match="uninitialized parameter"):
        build_strategy(strategy).prepare(net)
    with torch.no_grad():
        net(torch.ones(1, 3))
    model, _ = build_strategy(strategy).prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    assert model(torch.ones(2, 3)).shape == (2, 2)


@ranks(1, 2)
@pytest.mark.parametrize("strategy", ["single", "ddp"])
def test_values_on_the_meta_device_are_named_where_nothing_materializes_them(strategy: str):
    if strategy == "single" and get_world_size() > 1:
        return
    with torch.device("meta"):
        net = nn.Sequential(nn.Linear(3, 3))
    with pytest.raises(ConfigError, match=r"`0\.weight` must have values, but is on the meta device .*strategy 'fsdp'"):
        build_strategy(strategy).prepare(net)
