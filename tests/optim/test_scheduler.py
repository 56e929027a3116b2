"""Schedules of torch, counted by epochs or batches, within windows."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from lockstep.errors import ConfigError, RegistryError
from lockstep.optim import ParamScheduler, build_param_schedulers


def sgd(lr: float = 1.0) -> torch.optim.SGD:
    return torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=lr)


def course(optimizer, schedulers, counts: int) -> list[float]:
    """Return the learning rate that each count begins with."""
    values = []
    for _ in range(counts):
        values.append(optimizer.param_groups[0]["lr"])
        for scheduler in schedulers:
            scheduler.step()
    return values


@pytest.mark.parametrize(
    ("name", "kwargs"),
    [
        ("ConstantLR", {"factor": 0.5, "total_iters": 3}),
        ("LinearLR", {"start_factor": 0.1, "total_iters": 4}),
        ("StepLR", {"step_size": 3, "gamma": 0.5}),
        ("MultiStepLR", {"milestones": [2, 5], "gamma": 0.1}),
        ("ExponentialLR", {"gamma": 0.9}),
        ("CosineAnnealingLR", {"T_max": 8, "eta_min": 0.1}),
        ("PolynomialLR", {"total_iters": 6, "power": 2}),
    ],
)
@pytest.mark.parametrize("by_class", [True, False])
def test_a_whole_window_is_torchs_own_schedule(name, kwargs, by_class):
    kind = getattr(lr_scheduler, name)
    mine = sgd()
    built = build_param_schedulers(
        mine, {"type": kind if by_class else name, "by_epoch": False, **kwargs}, max_epochs=None, max_iters=8
    )
    theirs = sgd()
    reference = kind(theirs, **kwargs)
    expected = []
    for _ in range(8):
        expected.append(theirs.param_groups[0]["lr"])
        theirs.step()
        reference.step()
    assert course(mine, built, 8) == expected


def test_a_warmup_is_followed_by_a_cosine():
    optimizer = sgd(lr=2.0)
    schedulers = build_param_schedulers(
        optimizer,
        [
            {"type": "LinearLR", "start_factor": 0.25, "by_epoch": False, "end": 4},
            {"type": "CosineAnnealingLR", "by_epoch": False, "begin": 4},
        ],
        max_epochs=None,
        max_iters=10,
    )
    values = course(optimizer, schedulers, 11)
    assert values[:4] == pytest.approx([0.5, 1.0, 1.5, 2.0])  # all the way up in the window's last batch
    assert values[4] == pytest.approx(2.0)
    assert values[4:] == sorted(values[4:], reverse=True)
    assert values[7] == pytest.approx(1.0)  # half of the cosine
    assert values[10] == pytest.approx(values[9])  # its window is over with the training


def test_length_defaults_to_the_window():
    (scheduler,) = build_param_schedulers(sgd(), {"type": "CosineAnnealingLR", "begin": 2}, max_epochs=9, max_iters=90)
    assert scheduler.by_epoch
    assert "T_max=7" in repr(scheduler)


@pytest.mark.parametrize("steps", [0, 1, 3, 5])
def test_a_schedule_goes_on_from_its_state(steps):
    cfg = [
        {"type": "LinearLR", "start_factor": 0.5, "total_iters": 2, "end": 3},
        {"type": "MultiStepLR", "milestones": [1, 3], "begin": 3},
    ]

    def make():
        optimizer = sgd()
        return optimizer, build_param_schedulers(optimizer, cfg, max_epochs=9, max_iters=9)

    whole = course(*make(), 8)
    optimizer, schedulers = make()
    first = course(optimizer, schedulers, steps)
    other_optimizer, others = make()
    for other, scheduler in zip(others, schedulers, strict=True):
        other.load_state_dict(scheduler.state_dict())
    other_optimizer.load_state_dict(optimizer.state_dict())
    assert first + course(other_optimizer, others, 8 - steps) == pytest.approx(whole)


def test_stepping_before_the_optimizer_does_not_warn():
    optimizer = sgd()
    course(
        optimizer, build_param_schedulers(optimizer, {"type": "StepLR", "step_size": 1}, max_epochs=3, max_iters=3), 3
    )
    assert optimizer.param_groups[0]["lr"] == pytest.approx(1e-3)


@pytest.mark.parametrize(
    ("cfg", "error", "says"),
    [
        ({"type": "CosineLR"}, RegistryError, "did you mean `CosineAnnealing"),
        ({"type": torch.optim.SGD}, ConfigError, "subclass of torch.optim.lr_scheduler.LRScheduler"),
        ({"type": "StepLR", "step": 2, "begin": 3}, ConfigError, "StepLR: .*'step_?.*step_size, gamma"),
        ({"type": "StepLR", "step_size": 2, "begin": 3, "end": 3}, ConfigError, "less than `end`.*3 and 3"),
        ("StepLR", TypeError, "config dict"),
    ],
)
def test_wrong_configs_are_refused_at_once(cfg, error, says):
    with pytest.raises(error, match=says):
        build_param_schedulers(sgd(), [cfg], max_epochs=9, max_iters=90)


def test_a_schedule_of_the_users_own_object_is_refused_with_the_remedy():
    with pytest.raises(TypeError, match=r"dict\(type=StepLR, step_size=2\)"):
        build_param_schedulers(sgd(), lr_scheduler.StepLR(sgd(), 2), max_epochs=9, max_iters=9)


def test_param_scheduler_objects_are_taken_as_they_are():
    optimizer = sgd()
    scheduler = ParamScheduler(lr_scheduler.StepLR, optimizer, step_size=1)
    assert build_param_schedulers(optimizer, scheduler, max_epochs=1, max_iters=1) == [scheduler]
    assert scheduler.get_last_value() == [1.0]
