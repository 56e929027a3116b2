"""What the message hub keeps and gives out."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from lockstep import Session
from lockstep.dist import get_rank
from lockstep.logging import MessageHub, read_scalars
from lockstep.testing import ranks
from lockstep.visualization import Visualizers


def test_histories_give_what_is_asked_of_them():
    hub = MessageHub()
    hub.update_scalars({"loss": 3.0, "lr": {"value": 0.1, "count": 4}}, resumed=False)
    hub.update_scalar("loss", torch.tensor(1.0), count=8)
    loss = hub.get_scalar("loss")
    assert (loss.current(), loss.mean(), loss.min(), loss.max(1)) == (1.0, 4 / 9, 1.0, 1.0)  # as MMEngine's
    assert loss.data == ([3.0, 1.0], [1, 8])
    assert loss.statistics("mean", 1) == 1 / 8
    assert hub.get_scalar("lr").current() == 0.1
    with pytest.raises(KeyError, match="must be current, mean, min or max, but is 'median'"):
        loss.statistics("median")


def test_infos_that_nobody_has_set_are_asked_for():
    hub = MessageHub()
    count = iter(range(5))
    hub.provide_info("iter", lambda: next(count))
    assert (hub.get_info("iter"), hub.get_info("iter")) == (0, 1)
    hub.update_info_dict({"iter": 7, "note": "x"})
    assert (hub.get_info("iter"), hub.pop_info("note"), hub.get_info("note", "gone")) == (7, "x", "gone")


def test_the_current_hub_can_be_had_anywhere():
    hub = MessageHub()
    hub.make_current()
    assert MessageHub.get_current_instance() is hub


def test_numbers_and_tensors_are_read_together():
    loss = torch.tensor([2.5], requires_grad=True)
    assert read_scalars([1, loss, torch.tensor(3), 4.5]) == [1.0, 2.5, 3.0, 4.5]


def test_a_history_keeps_what_a_tensor_was_and_nothing_of_how_it_was_computed():
    hub, total, weight = MessageHub(), torch.zeros(()), torch.ones(1, requires_grad=True)
    for _ in range(3):
        total += weight.detach().sum()
        hub.update_scalar("total", total)
        hub.update_scalar("loss", weight * 2)
    assert hub.get_scalar("total").data[0] == [1.0, 2.0, 3.0]
    assert not any(value.requires_grad for value in hub.get_scalar("loss").values)


def test_a_history_that_has_begun_is_kept_as_long_as_a_later_one():
    hub = MessageHub()
    hub.update_scalar("early", 0.0)
    hub.keep(1500)
    for value in range(1, 2000):
        hub.update_scalar("early", value)
    assert hub.get_scalar("early").data[0] == list(range(500, 2000))


def test_what_is_no_scalar_is_refused_where_it_is_recorded():
    hub = MessageHub()
    for value in (np.array(2.5), np.array([3.5]), np.float16(4.5), np.bool_(True), torch.tensor([[3]])):
        hub.update_scalar("norm", value)
        assert hub.get_scalar("norm").current() == value
    for value in (torch.ones(3), torch.tensor(1j), np.array([1j]), np.datetime64("2026-01-01"), None, "high"):
        with pytest.raises(TypeError, match="`norm` must be a number or a scalar tensor to be recorded, but is"):
            hub.update_scalar("norm", value)


@ranks(2)
def test_a_value_of_which_each_rank_has_a_part_is_recorded_whole_or_not_at_all(tmp_path: Path):
    weights, mesh = torch.arange(6.0), init_device_mesh("cpu", (2,))
    norm = distribute_tensor(weights, mesh, [Shard(0)]).norm()
    hub, session = MessageHub(), Session(tmp_path, log_level="ERROR")
    session.prepare(net := nn.Linear(1, 1), torch.optim.SGD(net.parameters(), lr=0.1))
    records = [lambda value: hub.update_scalar("norm", value), lambda value: session.log({"norm": value})]
    if get_rank() == 0:  # elsewhere there is no visualizer
        records.append(lambda value: Visualizers().add_scalar("norm", value))
    for _ in session.iterations(1):
        for record in records:
            with pytest.raises(TypeError, match=r"`norm` must be .* a DTensor, of which each rank has a part.*full_t"):
                record(norm)
        session.step(net(torch.ones(1, 1)).sum())
    for value in (norm.full_tensor(), distribute_tensor(weights.norm(), mesh, [Replicate()])):
        hub.update_scalar("norm", value)
        assert hub.get_scalar("norm").current() == pytest.approx(float(weights.norm()))
