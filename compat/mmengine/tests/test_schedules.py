"""Schedules give MMEngine's values, bit by bit."""

from __future__ import annotations

import pytest
import torch

from mmengine.optim import CosineAnnealingLR, LinearLR
from mmengine.optim.scheduler.lr_scheduler import LRSchedulerMixin
from mmengine.optim.scheduler.param_scheduler import _ParamScheduler
from mmengine.registry import PARAM_SCHEDULERS

SCRIPT = """
import torch
from mmengine.optim import *
from mmengine.registry import PARAM_SCHEDULERS

cases = [
    ("sgd", [dict(type="ConstantLR", factor=0.3, end=5)]),
    ("sgd", [dict(type="LinearLR", start_factor=0.01, end=7)]),
    ("sgd", [dict(type="CosineAnnealingLR", T_max=9, eta_min=1e-4)]),
    ("sgd", [dict(type="CosineAnnealingLR", T_max=4, eta_min_ratio=0.1, end=19)]),
    ("sgd", [dict(type="LinearLR", start_factor=0.1, end=5), dict(type="CosineAnnealingLR", begin=5, end=20)]),
    ("sgd", [dict(type="LinearLR", start_factor=0.1, end=5), dict(type="MultiStepLR", milestones=[6, 6, 12])]),
    ("sgd", [dict(type="ExponentialLR", gamma=0.9, begin=2, end=11)]),
    ("sgd", [dict(type="StepLR", step_size=3, gamma=0.5)]),
    ("sgd", [dict(type="PolyLR", power=0.9, eta_min=1e-4, end=18)]),
    ("sgd", [dict(type="OneCycleLR", eta_max=0.5, total_steps=20)]),
    ("sgd", [dict(type="OneCycleLR", eta_max=0.5, total_steps=20, three_phase=True, anneal_strategy="linear")]),
    ("sgd", [dict(type="CosineRestartLR", periods=[5, 7, 8], restart_weights=[1, 0.5, 0.3], eta_min=1e-3)]),
    ("sgd", [dict(type="LinearLR", start_factor=0.1, end=2, epoch_length=4, convert_to_iter_based=True)]),
    ("sgd", [dict(type="CosineAnnealingLR", T_max=4, end=5, epoch_length=4, convert_to_iter_based=True)]),
    ("sgd", [dict(type="MultiStepLR", milestones=[1, 3], epoch_length=4, convert_to_iter_based=True)]),
    ("sgd", [dict(type="LinearMomentum", start_factor=0.5, end=6), dict(type="StepMomentum", step_size=9, begin=6)]),
    ("adam", [dict(type="CosineAnnealingMomentum", T_max=9, eta_min=0.2)]),
    ("adam", [dict(type="PolyParamScheduler", param_name="weight_decay", power=2, end=10)]),
]
for number, (kind, configs) in enumerate(cases):
    layers = [torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)]
    groups = [dict(params=list(layers[0].parameters())), dict(params=list(layers[1].parameters()), lr=0.37)]
    make = dict(sgd=lambda: torch.optim.SGD(groups, lr=0.1, momentum=0.9),
                adam=lambda: torch.optim.AdamW(groups, lr=0.1, weight_decay=0.05))
    optimizer = make[kind]()
    schedulers = [PARAM_SCHEDULERS.build(one, default_args=dict(optimizer=optimizer)) for one in configs]
    rows = []
    for step in range(19):
        optimizer.step()
        keys = ("lr", "momentum", "betas", "weight_decay")
        rows.append([[group.get(key) for key in keys] for group in optimizer.param_groups])
        for scheduler in schedulers:
            scheduler.step()
    kept = ("last_step", "base_values", "begin", "by_epoch", "_last_value")
    states = [{key: scheduler.state_dict()[key] for key in kept} for scheduler in schedulers]
    answers[f"{number} {configs}"] = [rows, states]
"""


def test_values_are_those_of_mmengine_in_every_bit(both):
    ours, theirs = both(SCRIPT)
    assert len(ours) == 18
    for case, values in theirs.items():
        assert ours[case] == values, case


def optimizer():
    return torch.optim.SGD(torch.nn.Linear(2, 1).parameters(), lr=1.0)


def test_a_subclass_says_its_next_value():
    class Halve(LRSchedulerMixin, _ParamScheduler):
        def _get_value(self):
            factor = 1 if self.last_step == 0 else 0.5
            return [group[self.param_name] * factor for group in self.optimizer.param_groups]

    sgd = optimizer()
    schedule = Halve(sgd, begin=1, end=3)
    seen = []
    for _ in range(4):
        seen.append(sgd.param_groups[0]["lr"])
        schedule.step()
    assert seen == [1.0, 1.0, 0.5, 0.5]


def test_a_state_continues_a_schedule():
    first = optimizer()
    schedule = CosineAnnealingLR(first, T_max=10)
    for _ in range(4):
        schedule.step()
    second = optimizer()
    second.load_state_dict(first.state_dict())
    other = CosineAnnealingLR(second, T_max=10)
    other.load_state_dict(schedule.state_dict())
    second.load_state_dict(first.state_dict())
    schedule.step()
    other.step()
    assert first.param_groups[0]["lr"] == second.param_groups[0]["lr"]


def test_wrong_windows_and_conversions_raise():
    with pytest.raises(ValueError, match="must be above `begin`"):
        LinearLR(optimizer(), begin=3, end=3)
    with pytest.raises(ValueError, match="epoch_length"):
        PARAM_SCHEDULERS.build(
            {"type": "StepLR", "step_size": 1, "convert_to_iter_based": True}, default_args={"optimizer": optimizer()}
        )
