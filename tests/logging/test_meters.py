"""What the message hub keeps and gives out."""

from __future__ import annotations

import pytest
import torch

from lockstep.logging import MessageHub, read_scalars


def test_histories_give_what_is_asked_of_them():
    hub = MessageHub()
    hub.update_scalars({"loss": 3.0, "lr": {"value": 0.1, "count": 4}}, resumed=False)
    hub.update_scalar("loss", torch.tensor(1.0), count=8)
    loss = hub.get_scalar("loss")
    assert (loss.current(), loss.mean(), loss.min(), loss.max(1)) == (1.0, 2.0, 1.0, 1.0)
    assert loss.data == ([3.0, 1.0], [1, 1])
    assert loss.statistics("mean", 1) == 1.0
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
    assert MessageHub.get_instance("mine") is MessageHub.get_instance("mine")
    assert MessageHub.get_instance("mine").name == "mine"


def test_numbers_and_tensors_are_read_together():
    loss = torch.tensor([2.5], requires_grad=True)
    assert read_scalars([1, loss, torch.tensor(3), 4.5]) == [1.0, 2.5, 3.0, 4.5]
