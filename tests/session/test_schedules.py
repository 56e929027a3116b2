"""Schedules that the user's own code steps."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - as everybody calls it

from lockstep import Session
from lockstep.errors import ConfigError
from lockstep.session.epoch_body import Rates
from lockstep.testing import ranks

from .by_hand import STRATEGIES, loader, network, session_of


@pytest.mark.parametrize("strategy", STRATEGIES)
@ranks(1, 2)
def test_records_have_the_rates_of_the_update_although_the_loop_steps_its_schedule_after_it(tmp_path, strategy):
    session = session_of(tmp_path, strategy=strategy, default_hooks={"logger": {"interval": 1}})
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    model, _, batches = session.prepare(model, optimizer, loader(), schedulers=schedule)
    for _ in session.epochs(1):
        for x, y in batches:
            session.step(F.cross_entropy(model(x), y))
            schedule.step()
    if session.is_main:
        records = [json.loads(line) for line in (session.run_dir / "metrics.jsonl").read_text().splitlines()]
        rates = [record["lr"] for record in records if record["mode"] == "train"]
        assert rates == [0.5**update for update in range(6)]


def test_a_scheduler_over_the_wrapper_says_over_what_it_is_made(tmp_path):
    model = network()
    session = Session(tmp_path)
    model, wrapper = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(TypeError, match="is not an Optimizer"), session:
        torch.optim.lr_scheduler.StepLR(wrapper, 1)
    log = (session.run_dir / "log.txt").read_text()
    assert "a scheduler takes your own optimizer" in log


@pytest.mark.parametrize("is_made", ["before", "before and handed in", "after"])
def test_a_scheduler_that_is_not_handed_in_is_told(tmp_path, is_made):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedules = [] if is_made == "after" else [torch.optim.lr_scheduler.StepLR(optimizer, 10)]
    session = Session(tmp_path)
    handed_in = schedules if is_made == "before and handed in" else []
    _, wrappers = session.prepare({"net": model}, {"net": optimizer}, schedulers=handed_in)
    if is_made == "after":
        torch.optim.lr_scheduler.StepLR(wrappers["net"].optimizer, 10)
    next(session.iterations(1))
    told = "SGD has a scheduler that is not handed to prepare(..., schedulers=...), before which it must be made"
    assert (told in (session.run_dir / "log.txt").read_text()) is not bool(handed_in)


def test_of_several_optimizers_the_one_whose_scheduler_is_not_handed_in_is_told(tmp_path):
    models = {"net": network(), "critic": network()}
    optimizers = {
        "net": torch.optim.SGD(models["net"].parameters()),
        "critic": torch.optim.Adam(models["critic"].parameters()),
    }
    of_net, _ = (torch.optim.lr_scheduler.StepLR(optimizer, 10) for optimizer in optimizers.values())
    session = Session(tmp_path)
    session.prepare(models, optimizers, schedulers=of_net)
    next(session.iterations(1))
    log = (session.run_dir / "log.txt").read_text()
    assert "Adam has a scheduler that is not handed" in log
    assert "SGD has a scheduler" not in log


@pytest.mark.parametrize("handed_in", [torch.optim.SGD, lambda _: {"type": "SGD", "lr": 0.1}])
def test_a_scheduler_over_an_optimizer_that_is_not_handed_in_is_refused(tmp_path, handed_in):
    model = network()
    schedule = torch.optim.lr_scheduler.StepLR(torch.optim.Adam(model.parameters()), 10)
    with pytest.raises(ConfigError, match="but StepLR is over another Adam, so that it would change no rate"):
        session_of(tmp_path).prepare(model, handed_in(model.parameters()), schedulers=schedule)


def test_a_scheduler_over_an_optimizer_inside_the_one_that_is_handed_in_is_taken(tmp_path):
    model = network()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    outer = torch.optim.Optimizer(inner.param_groups, {})  # as a wrapper that holds another optimizer's groups
    session_of(tmp_path).prepare(model, outer, schedulers=torch.optim.lr_scheduler.StepLR(inner, 10))


@pytest.mark.parametrize("epochs", [1, 3])
@pytest.mark.parametrize("steps", [False, True])
def test_a_scheduler_that_is_never_stepped_is_told_once(tmp_path, epochs, steps):
    with session_of(tmp_path, log_level="WARNING") as session:
        optimizer = torch.optim.SGD((model := network()).parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        model, _, batches = session.prepare(model, optimizer, loader(), schedulers=scheduler)
        for _ in session.epochs(epochs):
            for x, y in batches:
                session.step(F.cross_entropy(model(x), y))
            if steps:
                scheduler.step()
    log = (session.run.run_dir / "log.txt").read_text()
    assert log.count("no step of StepLR since the training began: call scheduler.step()") == (not steps)


def test_of_two_schedulers_of_a_class_the_one_that_is_never_stepped_is_told(tmp_path):
    with session_of(tmp_path, log_level="WARNING") as session:
        optimizer = torch.optim.SGD((model := network()).parameters(), lr=0.1)
        schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, size) for size in (1, 2)]
        model, _, batches = session.prepare(model, optimizer, loader(), schedulers=schedulers)
        for _ in session.epochs(1):
            for x, y in batches:
                session.step(F.cross_entropy(model(x), y))
            schedulers[1].step()
    assert "no step of StepLR since" in (session.run.run_dir / "log.txt").read_text()


def test_what_is_no_scheduler_is_refused(tmp_path):
    model = network()
    with pytest.raises(TypeError, match=r"`schedulers` must have state_dict\(\) and .* before prepare\(\)"):
        session_of(tmp_path).prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), schedulers=[{"type": 1}])


class Outer(torch.optim.Optimizer):
    """Steps another optimizer, and has copies of its groups."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__([dict(group) for group in inner.param_groups], {})
        self.inner = inner

    def step(self, closure=None):
        return self.inner.step(closure)


def test_a_scheduler_over_an_optimizer_of_whose_groups_the_outer_one_has_copies_is_taken(tmp_path):
    model = network()
    outer = Outer(torch.optim.SGD(model.parameters(), lr=0.1))
    session_of(tmp_path).prepare(model, outer, schedulers=torch.optim.lr_scheduler.StepLR(outer.inner, 10))


def test_a_small_change_of_a_rate_that_is_a_tensor_is_seen_and_undone_in_place():
    optimizer = torch.optim.SGD(network().parameters(), lr=torch.tensor(0.1, dtype=torch.float64))
    (group,) = optimizer.param_groups
    rates, rate = Rates(SimpleNamespace(optim_wrapper=optimizer, param_schedulers=[])), group["lr"]
    assert not rates.have_changed
    rate.mul_(1 - 1e-9)
    assert rates.have_changed
    assert rates.restore()
    assert group["lr"] is rate  # a compiled step reads this tensor
    assert rate.item() == 0.1
