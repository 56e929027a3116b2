"""`Strategy.prepare`: a model from a config, and compilation."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import nn

from lockstep.dist import get_rank, get_world_size
from lockstep.errors import ConfigError, PeerError
from lockstep.strategy import DDPStrategy, SingleDeviceStrategy, build_strategy
from lockstep.testing import RankFailure, ranks, run_ranks

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


@ranks(1, 2)
def test_ddp_refuses_to_train_what_it_can_not_wrap():
    model = nn.Linear(2, 1).requires_grad_(False)
    assert DDPStrategy().prepare(model) == (model, None)  # to evaluate it
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if get_world_size() == 1:
        assert DDPStrategy().prepare(model, optimizer)[0] is model
        return
    with pytest.raises(ConfigError, match="gradients of what is unfrozen later would not be averaged"):
        DDPStrategy().prepare(model, optimizer)


@ranks(1, 2)
def test_an_argument_that_the_wrapper_of_ddp_does_not_have_is_told_on_any_number_of_ranks():
    build_strategy({"type": "ddp", "find_unused_parameters": True, "static_graph": False, "bucket_cap_mb": 5})
    for given in ({"find_unused": True}, {"model_wrapper": {"find_unused": True}}):
        with pytest.raises(ConfigError, match=r"key 'find_unused': did you mean `find_unused_parameters`"):
            build_strategy({"type": "ddp", **given})


def lose_rank_1_while_ddp_is_built(folder: Path) -> None:
    """Kill rank 1 before torch's DDP sends the values of rank 0."""

    def kill(*args: object, **kwargs: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    if get_rank() == 1:
        with patch("torch.nn.parallel.distributed._sync_module_states", kill):
            DDPStrategy().prepare(nn.Linear(2**10, 2**10))
    with pytest.raises(PeerError, match=r"rank 1 of the default group .*a collective of torch's own"):
        DDPStrategy().prepare(nn.Linear(2**10, 2**10))
    (folder / "named").touch()


def test_a_rank_that_is_killed_while_a_model_is_wrapped_is_named(tmp_path: Path) -> None:
    with pytest.raises(RankFailure, match="SIGKILL"):
        run_ranks(2, lose_rank_1_while_ddp_is_built, tmp_path)
    assert (tmp_path / "named").exists()
