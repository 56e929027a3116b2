"""Schedules of parameters, as MMEngine's documentation of them shows, and as torch computes the same ones."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, lr_scheduler

from mmengine.optim import (
    ConstantLR,
    CosineAnnealingLR,
    ExponentialLR,
    LinearLR,
    LinearMomentum,
    LinearParamScheduler,
    MultiStepLR,
    MultiStepMomentum,
    OptimWrapper,
    PolyLR,
    ReduceOnPlateauLR,
    StepLR,
    _ParamScheduler,
)
from mmengine.optim.scheduler import CosineRestartLR, OneCycleLR
from mmengine.registry import PARAM_SCHEDULERS


def optimizer_of(lr=1.0, kind=SGD, **kwargs):
    return kind([nn.Parameter(torch.ones(1))], lr=lr, **kwargs)


def rates(optimizer, schedulers, steps, key="lr"):
    found = []
    schedulers = schedulers if isinstance(schedulers, list) else [schedulers]
    for _ in range(steps):
        found.append(optimizer.param_groups[0][key])
        optimizer.step()
        for scheduler in schedulers:
            scheduler.step()
    return found


@pytest.mark.parametrize(
    ("ours", "torchs"),
    [
        (lambda o: StepLR(o, step_size=3, gamma=0.5), lambda o: lr_scheduler.StepLR(o, 3, 0.5)),
        (lambda o: MultiStepLR(o, milestones=[2, 5, 5]), lambda o: lr_scheduler.MultiStepLR(o, [2, 5, 5])),
        (lambda o: ExponentialLR(o, gamma=0.8), lambda o: lr_scheduler.ExponentialLR(o, 0.8)),
        (lambda o: ConstantLR(o, factor=0.3, end=5), lambda o: lr_scheduler.ConstantLR(o, 0.3, 4)),
        (lambda o: CosineAnnealingLR(o, T_max=8), lambda o: lr_scheduler.CosineAnnealingLR(o, 8)),
        (lambda o: LinearLR(o, start_factor=0.1, end=6), lambda o: lr_scheduler.LinearLR(o, 0.1, total_iters=5)),
        (lambda o: PolyLR(o, power=2.0, end=9), lambda o: lr_scheduler.PolynomialLR(o, 8, 2.0)),
    ],
)
def test_schedules_are_those_of_torch(ours, torchs):
    one, two = optimizer_of(), optimizer_of()
    theirs = torchs(two)
    assert rates(one, ours(one), 9) == pytest.approx(rates(two, theirs, 9))


def test_a_warm_up_comes_before_the_main_schedule():
    optimizer = optimizer_of(0.1)
    warm = LinearLR(optimizer, start_factor=0.01, by_epoch=False, begin=0, end=5)
    main = MultiStepLR(optimizer, by_epoch=False, milestones=[8, 10], gamma=0.1)
    found = rates(optimizer, [warm, main], 12)
    assert found[0] == pytest.approx(0.001)
    assert found[4:8] == pytest.approx([0.1] * 4)
    assert found[8:] == pytest.approx([0.01, 0.01, 0.001, 0.001])


def test_a_schedule_acts_in_its_window():
    optimizer = optimizer_of()
    found = rates(optimizer, CosineAnnealingLR(optimizer, T_max=4, begin=3, end=7, eta_min=0.2), 10)
    assert found[:4] == [1.0] * 4
    assert found[5] == pytest.approx(0.2 + 0.8 * (1 + math.cos(math.pi / 2)) / 2)
    assert found[7:] == [found[6]] * 3


def test_a_least_rate_as_a_ratio():
    optimizer = optimizer_of(2.0)
    found = rates(optimizer, CosineAnnealingLR(optimizer, T_max=3, eta_min_ratio=0.1), 5)
    assert found[3] == pytest.approx(0.2)


def test_momenta_are_scheduled():
    optimizer = optimizer_of(momentum=0.5)
    found = rates(optimizer, LinearMomentum(optimizer, start_factor=0.2, end=5), 6, "momentum")
    assert found[0] == pytest.approx(0.1)
    assert found[4:] == pytest.approx([0.5, 0.5])


def test_the_momentum_of_adam_is_its_first_beta():
    optimizer = optimizer_of(kind=Adam, betas=(0.9, 0.999))
    rates(optimizer, MultiStepMomentum(optimizer, milestones=[1], gamma=0.5), 2)
    assert optimizer.param_groups[0]["betas"] == (0.45, 0.999)


def test_any_parameter_is_scheduled():
    optimizer = optimizer_of(weight_decay=0.4)
    schedule = LinearParamScheduler(optimizer, param_name="weight_decay", start_factor=0.5, end=3)
    assert rates(optimizer, schedule, 3, "weight_decay") == pytest.approx([0.2, 0.3, 0.4])


def test_a_schedule_takes_an_optim_wrapper():
    wrapper = OptimWrapper(optimizer=optimizer_of())
    schedule = StepLR(wrapper, step_size=1, gamma=0.5)
    wrapper.optimizer.step()
    schedule.step()
    assert wrapper.get_lr() == {"lr": [0.5]}


def test_cosine_restarts():
    optimizer = optimizer_of()
    schedule = CosineRestartLR(optimizer, periods=[3, 4], restart_weights=[1, 0.5], eta_min=0.0, end=7)
    found = rates(optimizer, schedule, 7)
    assert found[0] == 1.0
    assert found[3] == pytest.approx(0.5)
    assert found[2] == pytest.approx((1 + math.cos(math.pi * 2 / 3)) / 2)


def test_one_cycle_rises_and_falls():
    optimizer = optimizer_of(0.1)
    found = rates(optimizer, OneCycleLR(optimizer, eta_max=1.0, total_steps=10), 10)
    assert found[0] == pytest.approx(1.0 / 25)
    assert max(found) == pytest.approx(1.0, abs=0.06)
    assert found[-1] < found[0]


def test_a_plateau_lowers_the_rate():
    optimizer = optimizer_of()
    schedule = ReduceOnPlateauLR(optimizer, monitor="loss", patience=1, factor=0.1)
    optimizer.step()
    for value in (1.0, 0.9, 0.9, 0.9):
        schedule.step(dict(loss=value))
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1)


def test_where_a_schedule_stands():
    optimizer = optimizer_of()
    schedule = StepLR(optimizer, step_size=2, gamma=0.5)
    assert (schedule.last_step, schedule.begin, schedule.by_epoch, schedule.base_values) == (0, 0, True, [1.0])
    rates(optimizer, schedule, 3)
    assert schedule.last_step == 3
    assert schedule.get_last_value() == [0.5]
    assert schedule.param_name == "lr"


def test_the_state_of_a_schedule_goes_on():
    one, two = optimizer_of(), optimizer_of()
    first, second = (MultiStepLR(o, milestones=[2, 4], gamma=0.1) for o in (one, two))
    rates(one, first, 3)
    state = first.state_dict()
    assert state["last_step"] == 3
    assert "optimizer" not in state
    two.param_groups[0]["lr"] = one.param_groups[0]["lr"]
    second.load_state_dict(state)
    assert rates(one, first, 3) == rates(two, second, 3)


def test_a_schedule_of_epochs_is_counted_in_iterations():
    optimizer = optimizer_of()
    schedule = MultiStepLR.build_iter_from_epoch(optimizer=optimizer, milestones=[1, 2], gamma=0.1, epoch_length=3)
    assert schedule.by_epoch is False
    assert rates(optimizer, schedule, 7) == pytest.approx([1, 1, 1, 0.1, 0.1, 0.1, 0.01])


@pytest.mark.parametrize(
    ("cfg", "found"),
    [
        (dict(type="StepLR", step_size=2, begin=1, end=4), dict(step_size=20, begin=10, end=40)),
        (dict(type="CosineAnnealingLR", T_max=3, end=3), dict(T_max=30, end=30)),
        (dict(type="LinearLR", start_factor=0.1, end=2), dict(total_iters=19, end=20)),
        (dict(type="PolyLR", begin=1, end=3), dict(total_iters=19, begin=10, end=30)),
        (dict(type="MultiStepLR", milestones=[1, 3]), dict(milestones={10: 1, 30: 1})),
        (dict(type="CosineRestartLR", periods=[2, 3], restart_weights=[1, 1], eta_min=0), dict(periods=[20, 30])),
        (dict(type="ExponentialLR", gamma=0.5, end=4), dict(end=40)),
        (dict(type="ConstantLR", end=4), dict(total_iters=39, end=40)),
    ],
)
def test_a_config_is_converted_to_iterations(cfg, found):
    schedule = PARAM_SCHEDULERS.build(
        cfg, default_args=dict(optimizer=optimizer_of(), convert_to_iter_based=True, epoch_length=10)
    )
    assert schedule.by_epoch is False
    assert {name: getattr(schedule, name) for name in found} == found


def test_a_converted_schedule_needs_the_length_of_an_epoch():
    with pytest.raises(AssertionError):
        StepLR.build_iter_from_epoch(optimizer=optimizer_of(), step_size=1, epoch_length=None)
    with pytest.raises(AssertionError):
        StepLR.build_iter_from_epoch(optimizer=optimizer_of(), step_size=1, epoch_length=3, by_epoch=False)


def test_a_schedule_of_ones_own():
    @PARAM_SCHEDULERS.register_module(force=True)
    class HalveParamScheduler(_ParamScheduler):
        def _get_value(self):
            if self.last_step == 0:
                return [group[self.param_name] for group in self.optimizer.param_groups]
            return [group[self.param_name] / 2 for group in self.optimizer.param_groups]

    optimizer = optimizer_of()
    schedule = PARAM_SCHEDULERS.build(dict(type="HalveParamScheduler", optimizer=optimizer, param_name="lr"))
    assert rates(optimizer, schedule, 4) == [1, 0.5, 0.25, 0.125]


def test_wrong_arguments_of_schedules():
    with pytest.raises(TypeError):
        StepLR("optimizer", step_size=1)
    with pytest.raises(ValueError):
        StepLR(optimizer_of(), step_size=1, begin=5, end=3)
    with pytest.raises(ValueError):
        LinearLR(optimizer_of(), start_factor=1.5)
    with pytest.raises(ValueError):
        ConstantLR(optimizer_of(), factor=1.5)
    with pytest.raises(AssertionError):
        CosineRestartLR(optimizer_of(), periods=[3], restart_weights=[1, 2], eta_min=0)
    with pytest.raises(ValueError):
        LinearMomentum(torch.optim.Adagrad([nn.Parameter(torch.ones(1))]), end=3)
    with pytest.raises(KeyError):
        StepLR(optimizer_of(), step_size=1, last_step=3)
