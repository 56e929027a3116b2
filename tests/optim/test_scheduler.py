"""Windows, configs and states of schedules, lockstep's own and torch's."""

from __future__ import annotations

import json
import math
import re
from functools import partial

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from lockstep.errors import ConfigError, RegistryError
from lockstep.optim import (
    LinearLR,
    MultiStepLR,
    OptimWrapper,
    OptimWrapperDict,
    ReduceOnPlateauLR,
    StepLR,
    TorchScheduler,
    build_param_schedulers,
)
from lockstep.registry import BuildError


def sgd(lr: float = 1.0, groups: int = 1) -> torch.optim.SGD:
    params = [{"params": [nn.Parameter(torch.zeros(1))], "lr": lr * 10**index} for index in range(groups)]
    return torch.optim.SGD(params, momentum=0.5, weight_decay=0.25)


def build(optimizer, cfg, *, epochs: int | None = None, iters: int | None = None):
    return build_param_schedulers(optimizer, cfg, max_epochs=epochs, max_iters=iters)


def course(optimizer, schedulers, counts: int, name: str = "lr") -> list[float]:
    """Return the value that each count begins with."""
    values = []
    for _ in range(counts):
        values.append(optimizer.param_groups[0][name])
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
        ("OneCycleLR", {"max_lr": 2.0, "total_steps": 9, "cycle_momentum": False}),
    ],
)
def test_a_class_of_torchs_is_taken_as_it_is(name, kwargs):
    kind = getattr(lr_scheduler, name)
    mine = sgd()
    built = build(mine, {"type": kind, "by_epoch": False, **kwargs}, iters=8)
    assert isinstance(built[0], TorchScheduler)
    theirs = sgd()
    reference = kind(theirs, **kwargs)
    expected = []
    for _ in range(8):
        expected.append(theirs.param_groups[0]["lr"])
        theirs.step()
        reference.step()
    assert course(mine, built, 8) == expected


@pytest.mark.parametrize("ours", [True, False])
def test_a_warmup_is_followed_by_a_cosine(ours):
    kinds = ("LinearLR", "CosineAnnealingLR") if ours else (lr_scheduler.LinearLR, lr_scheduler.CosineAnnealingLR)
    optimizer = sgd(lr=2.0)
    schedulers = build(
        optimizer,
        [
            {"type": kinds[0], "start_factor": 0.25, "by_epoch": False, "end": 4},
            {"type": kinds[1], "by_epoch": False, "begin": 4},
        ],
        iters=10,
    )
    values = course(optimizer, schedulers, 11)
    assert values[:4] == pytest.approx([0.5, 1.0, 1.5, 2.0])  # all the way up in the window's last batch
    assert values[4] == pytest.approx(2.0)
    assert values[4:] == sorted(values[4:], reverse=True)
    assert values[7] == pytest.approx(1.0)  # half of the cosine
    assert values[10] == pytest.approx(values[9])  # its window is over with the training


@pytest.mark.parametrize("kind", ["CosineAnnealingLR", lr_scheduler.CosineAnnealingLR])
def test_length_defaults_to_the_window(kind):
    (scheduler,) = build(sgd(), {"type": kind, "begin": 2}, epochs=9, iters=90)
    assert scheduler.by_epoch
    assert repr(scheduler) == "CosineAnnealingLR(epochs 2..9, T_max=7)"


CHAINS = {
    "ours": [
        {"type": "LinearLR", "start_factor": 0.5, "total_iters": 2, "end": 3},
        {"type": "MultiStepLR", "milestones": [1, 3], "begin": 3},
        {"type": "CosineAnnealingLR", "begin": 1, "end": 7, "param_name": "weight_decay"},
        {"type": "LinearMomentum", "start_factor": 0.5},
    ],
    "torch": [
        {"type": lr_scheduler.LinearLR, "start_factor": 0.5, "total_iters": 2, "end": 3},
        {"type": lr_scheduler.MultiStepLR, "milestones": [1, 3], "begin": 3},
    ],
    "mixed and overlapping": [
        {"type": "LinearLR", "start_factor": 0.1, "end": 5},
        {"type": lr_scheduler.ExponentialLR, "gamma": 0.5, "begin": 2},
        {"type": "CosineRestartLR", "periods": [3, 3], "eta_min": 0.1},
    ],
}


@pytest.mark.parametrize("steps", [0, 1, 3, 5])
@pytest.mark.parametrize("chain", CHAINS)
def test_a_schedule_goes_on_from_its_state_to_the_last_bit(chain, steps):
    def make():
        optimizer = sgd(groups=2)
        return optimizer, build(optimizer, CHAINS[chain], epochs=9, iters=9)

    def groups(optimizer):
        return [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]

    def run(optimizer, schedulers, counts):
        seen = []
        for _ in range(counts):
            for scheduler in schedulers:
                scheduler.step()
            seen.append(groups(optimizer))
        return seen

    whole = run(*make(), 8)
    optimizer, schedulers = make()
    first = run(optimizer, schedulers, steps)
    other_optimizer, others = make()
    for other, scheduler in zip(others, schedulers, strict=True):
        other.load_state_dict(json.loads(json.dumps(scheduler.state_dict())))
    other_optimizer.load_state_dict(optimizer.state_dict())
    assert first + run(other_optimizer, others, 8 - steps) == whole


@pytest.mark.parametrize("chain", CHAINS)
def test_a_group_that_is_added_goes_on_from_its_own_rate(chain):
    """As one of the same rate that has been there, times a factor that is its own; also from a state."""
    optimizer, reference = sgd(), sgd(groups=2)
    schedulers, others = (build(one, CHAINS[chain], epochs=9, iters=9) for one in (optimizer, reference))
    for count in range(9):
        if count == 4:
            rate = reference.param_groups[1]["lr"]
            optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))], "lr": rate})
        if count == 6:
            for scheduler in schedulers:
                scheduler.load_state_dict(json.loads(json.dumps(scheduler.state_dict())))
        for scheduler in [*schedulers, *others]:
            scheduler.step()
        if count >= 4:
            rates = [[group["lr"] for group in one.param_groups] for one in (optimizer, reference)]
            assert rates[0] == pytest.approx(rates[1]), count


def test_a_rate_that_is_scaled_is_that_of_its_own_optimizer_alone():
    """As where a training resumes with other rates, and a schedule of one of its optimizers follows a metric."""
    optimizer, other = sgd(), sgd()
    schedule = LinearLR(optimizer, start_factor=0.5, total_iters=2)
    schedule.rescale(other.param_groups[0], 4.0)
    optimizer.param_groups[0]["lr"] *= 2
    schedule.rescale(optimizer.param_groups[0], 2.0)
    assert course(optimizer, [schedule], 3) == [1.0, 1.5, 2.0]


def test_stepping_before_the_optimizer_does_not_warn():
    optimizer = sgd()
    course(optimizer, build(optimizer, {"type": lr_scheduler.StepLR, "step_size": 1}, epochs=3, iters=3), 3)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(1e-3)


@pytest.mark.parametrize(
    ("cfg", "error", "says"),
    [
        ({"type": "CosinLR"}, RegistryError, "did you mean `Cosine"),
        ({"type": torch.optim.SGD}, ConfigError, "subclass of torch.optim.lr_scheduler.LRScheduler"),
        (
            {"type": "StepLR", "step_siz": 2, "begin": 3},
            ConfigError,
            "`StepLR`: .*`step_siz`: did you mean `step_size`",
        ),
        (
            {"type": lr_scheduler.StepLR, "step": 2, "begin": 3},
            ConfigError,
            "`StepLR`: unknown argument `step`: did you mean `step_size`",
        ),
        ({"type": "StepLR", "step_size": 2, "begin": 3, "end": 3}, ConfigError, "less than `end`.*3 and 3"),
        ({"type": "StepLR", "step_size": 0}, ConfigError, "StepLR: `step_size` must be a number above 0, but is 0"),
        (
            {"type": "ExponentialMomentum", "gamma": 0.5, "param_name": "beta"},
            ConfigError,
            "a `beta` that is a number, but of SGD only dampening, lr, momentum, weight_decay are",
        ),
        ({"type": "LinearLR", "param_name": "nesterov"}, ConfigError, "a `nesterov` that is a number, but of SGD only"),
        ({"type": "LinearLR", "param_name": "params"}, ConfigError, "a `params` that is a number, but of SGD only"),
        ({"type": lr_scheduler.ReduceLROnPlateau}, ConfigError, r"dict\(type='ReduceOnPlateauLR'"),
        ({"type": "CosineAnnealingLR", "eta_min": 1, "eta_min_ratio": 1}, ConfigError, "either `eta_min` or"),
        ({"type": "CosineRestartLR", "periods": [1], "restart_weights": []}, ConfigError, "as many `restart_weights`"),
        ({"type": "OneCycleLR"}, ConfigError, "`eta_max` must be given"),
        ({"type": "OneCycleLR", "eta_max": [1.0, 2.0]}, ConfigError, "one number, or 1, one for each.*but has 2"),
        ({"type": "OneCycleLR", "eta_max": 1.0, "anneal_strategy": "cosine"}, ConfigError, "'cos' or 'linear'"),
        ({"type": "LinearLR", "start_factor": 0}, ConfigError, "`start_factor` must be above 0"),
        ("StepLR", TypeError, "config dict"),
    ],
)
def test_wrong_configs_are_refused_at_once(cfg, error, says):
    with pytest.raises(error, match=says):
        build(sgd(), [cfg], epochs=9, iters=90)


@pytest.mark.parametrize("convert", [False, True])
@pytest.mark.parametrize(
    ("kind", "arguments", "says"),
    [
        ("ConstantLR", {"factor": -0.5}, "`factor` must be a number of at least 0"),
        ("ConstantLR", {"total_iters": 0}, "`total_iters` must be a number above 0"),
        ("ConstantLR", {"end": math.nan}, "less than `end`"),
        ("LinearLR", {"end_factor": "1"}, "`end_factor` must be a number of at least 0"),
        ("LinearLR", {"total_iters": -1}, "`total_iters` must be a number above 0"),
        ("StepLR", {"step_size": 2, "gamma": -0.1}, "`gamma` must be a number of at least 0"),
        ("StepLR", {"step_size": [2]}, "`step_size` must be a number above 0"),
        ("StepLR", {"step_size": {2}}, "`step_size` must be a number above 0"),
        ("MultiStepLR", {"milestones": 5}, "`milestones` must be a list of numbers of at least 0"),
        ("MultiStepLR", {"milestones": [2], "gamma": math.nan}, "`gamma` must be a number of at least 0"),
        ("MultiStepLR", {"milestones": [-2]}, "`milestones` must be a list of numbers of at least 0"),
        ("ExponentialLR", {"gamma": -1}, "`gamma` must be a number of at least 0"),
        ("ExponentialLR", {"gamma": "0.9"}, "`gamma` must be a number of at least 0"),
        ("CosineAnnealingLR", {"eta_min": -1.0}, "`eta_min` must be a number of at least 0"),
        ("CosineAnnealingLR", {"T_max": [9]}, "`T_max` must be a number above 0"),
        ("PolyLR", {"power": math.nan}, "`power` must be a number of at least 0"),
        ("PolyLR", {"power": -1}, "`power` must be a number of at least 0"),
        ("PolyLR", {"eta_min_ratio": -0.1}, "`eta_min_ratio` must be a number of at least 0"),
        ("CosineRestartLR", {"periods": 5}, "`periods` must be a list of numbers of at least 0"),
        ("CosineRestartLR", {"periods": [5], "restart_weights": [-1]}, "`restart_weights` must be a list of numbers"),
        ("OneCycleLR", {"eta_max": 1.0, "div_factor": 0}, "`div_factor` must be a number above 0"),
        ("OneCycleLR", {"eta_max": 1.0, "final_div_factor": -1}, "`final_div_factor` must be a number above 0"),
        ("OneCycleLR", {"eta_max": 1.0, "pct_start": "x"}, "`pct_start` must be a number of at least 0"),
        ("OneCycleLR", {"eta_max": [-1.0]}, "`eta_max` must be a number of at least 0, or a list of numbers"),
        ("ReduceOnPlateauLR", {"factor": "x"}, "`factor` must be a number of at least 0"),
        ("ReduceOnPlateauLR", {"patience": -1}, "`patience` must be a number of at least 0"),
        ("ReduceOnPlateauLR", {"min_value": -0.1}, "`min_value` must be a number of at least 0, or a list of"),
        ("ReduceOnPlateauLR", {"min_value": [0.1, 0.2]}, "`min_value` must be one number, or 1, one for each"),
        ("OneCycleLR", {"eta_max": [0.1, 0.2], "begin": 3}, "`eta_max` must be one number, or 1, one for each"),
        ("LinearLR", {"begin": "1"}, "`begin` must be a number of at least 0 and less than `end`, but they are '1'"),
        ("StepLR", {"step_size": 2, "end": "5"}, "`begin` must be a number of at least 0 and less than `end`"),
    ],
)
def test_arguments_that_would_train_wrongly_or_fail_later_are_refused(kind, arguments, says, convert):
    with pytest.raises(ConfigError, match=re.escape(f"{kind}: ") + ".*" + re.escape(says)):
        build(sgd(), [{"type": kind, **arguments, "convert_to_iter_based": convert}], epochs=9, iters=90)


def test_lists_are_not_iterators_which_a_check_would_leave_empty():
    with pytest.raises(ConfigError, match="`milestones` must be a list of numbers of at least 0, but is <map object"):
        build(sgd(), {"type": "MultiStepLR", "milestones": map(int, ["2", "4"])}, epochs=9, iters=90)
    highest = torch.tensor([2.0]).numpy()
    assert build(sgd(), {"type": "OneCycleLR", "eta_max": highest}, epochs=9, iters=90)[0].first_values() == [2.0]
    periods = torch.tensor([2, 4]).numpy()
    assert build(sgd(), {"type": "CosineRestartLR", "periods": periods}, epochs=9, iters=90)[0].periods == [2, 4]


def test_epochs_are_not_counted_where_the_training_counts_none():
    optimizer = sgd()
    function = {"type": lambda optimizer: lr_scheduler.StepLR(optimizer, 1), "by_epoch": True}
    objects = StepLR(optimizer, 1), ReduceOnPlateauLR(optimizer, begin=2)
    configs = {"type": "StepLR", "step_size": 1}, {"type": lr_scheduler.CosineAnnealingLR}
    for one in (*configs, function, *objects):
        with pytest.raises(ConfigError, match=r": `by_epoch` must be False.*an epoch would never end"):
            build(optimizer, one, iters=9)
    for one in (StepLR(optimizer, 1, by_epoch=False), ReduceOnPlateauLR(optimizer)):  # which counts validations
        assert build(optimizer, one, iters=9) == [one]


def test_a_window_without_an_end_gives_a_schedule_of_torchs_no_length():
    schedulers = [TorchScheduler(lr_scheduler.PolynomialLR, sgd(), end=end) for end in (None, math.inf)]
    values = [course(one.optimizer, [one], 7) for one in schedulers]
    assert values[0] == values[1]
    assert values[0][-1] == 0


def test_a_schedule_of_torchs_whose_length_is_said_in_epochs_has_that_length():
    said = {"type": lr_scheduler.OneCycleLR, "max_lr": 2.0, "cycle_momentum": False, "by_epoch": False}
    courses = [
        course(optimizer, build(optimizer, {**said, **length}, epochs=9, iters=9), 6)
        for length in ({"epochs": 2, "steps_per_epoch": 3}, {"total_steps": 6})
        for optimizer in [sgd()]
    ]
    assert courses[0] == courses[1]


def test_a_schedule_of_the_users_own_object_is_refused_with_the_remedy():
    with pytest.raises(TypeError, match=r"dict\(type=LambdaLR, .* or dict\(type=get_linear_schedule_with_warmup, "):
        build(sgd(), lr_scheduler.StepLR(sgd(), 2), epochs=9, iters=9)


def test_objects_are_taken_as_they_are_and_may_be_made_of_an_optim_wrapper():
    optimizer = sgd()
    scheduler = StepLR(OptimWrapper(optimizer), 1)
    assert scheduler.optimizer is optimizer
    assert build(optimizer, scheduler, epochs=1, iters=1) == [scheduler]
    assert scheduler.get_last_value() == [1.0]
    with pytest.raises(TypeError, match="`optimizer` must be an optimizer or the optim wrapper of one"):
        StepLR(OptimWrapperDict(one=OptimWrapper(optimizer)), 1)
    with pytest.raises(ConfigError, match="`total_iters` or `end` must be given"):
        LinearLR(optimizer)


EPOCH = 5


@pytest.mark.parametrize(
    ("cfg", "by_epoch"),
    [
        ({"type": "StepLR", "step_size": 2}, True),
        ({"type": "MultiStepLR", "milestones": [1, 3], "begin": 1}, True),
        ({"type": "ExponentialLR", "gamma": 0.5}, False),
        ({"type": "CosineAnnealingLR", "begin": 1, "eta_min": 0.1}, False),
        ({"type": "CosineRestartLR", "periods": [2, 3], "restart_weights": [1, 0.5]}, False),
    ],
)
def test_what_is_meant_in_epochs_can_change_with_every_batch(cfg, by_epoch):
    """At the beginning of each epoch the values are those of the schedule by epochs."""
    whole, fine = sgd(), sgd()
    by_epochs = build(whole, cfg, epochs=6, iters=6 * EPOCH)
    by_batches = build(fine, {**cfg, "convert_to_iter_based": True}, epochs=6, iters=6 * EPOCH)
    assert not by_batches[0].by_epoch
    values = course(fine, by_batches, 6 * EPOCH)
    assert values[::EPOCH] == pytest.approx(course(whole, by_epochs, 6))
    assert (len(set(values)) < 5) == by_epoch


def test_parts_of_epochs_are_whole_batches_and_sets_are_lists():
    given = {"begin": 0.55, "end": math.inf, "milestones": {1, 2}}
    assert MultiStepLR.stretched(given, 100) == {"begin": 55, "end": math.inf, "milestones": [100, 200]}
    assert LinearLR.stretched({"begin": 0.01, "end": 0.01}, 30) == {"begin": 0, "end": 1}


def test_a_ramp_that_is_converted_takes_its_window():
    optimizer = sgd()
    cfg = {"type": "LinearLR", "start_factor": 0.1, "end": 2, "convert_to_iter_based": True}
    values = course(optimizer, build(optimizer, cfg, epochs=6, iters=6 * EPOCH), 3 * EPOCH)
    assert values[: 2 * EPOCH] == pytest.approx(torch.linspace(0.1, 1, 2 * EPOCH).tolist())
    assert values[2 * EPOCH :] == [1.0] * EPOCH
    for wrong in ({"by_epoch": False}, {"type": lr_scheduler.LinearLR}):
        with pytest.raises(ConfigError, match="LinearLR: `convert_to_iter_based` must be False unless"):
            build(optimizer, {**cfg, **wrong}, epochs=6, iters=6 * EPOCH)
    with pytest.raises(ConfigError, match="Elsewhere give numbers of iterations, with by_epoch=False"):
        build(optimizer, cfg, epochs=None, iters=6 * EPOCH)


@pytest.mark.parametrize("kind", ["StepLR", lr_scheduler.StepLR])
def test_arguments_that_mean_nothing_any_more_are_told_or_refused(kind, caplog):
    build(sgd(), {"type": kind, "step_size": 1, "verbose": False, "last_step": -1}, epochs=2)
    assert not caplog.text
    build(sgd(), {"type": kind, "step_size": 1, "verbose": True}, epochs=2)
    assert "StepLR: `verbose` does nothing: the values are in every record" in caplog.text
    with pytest.raises(ConfigError, match=r"StepLR: `last_step` must be -1, but is 3\. To continue .* resume=True"):
        build(sgd(), {"type": kind, "step_size": 1, "last_step": 3}, epochs=2)


def warmed_up(optimizer, num_warmup_steps: int, last_epoch: int = -1):
    """Return a schedule as the functions of transformers make them."""
    return lr_scheduler.LambdaLR(optimizer, partial(warmth, after=num_warmup_steps), last_epoch)


def by_name(name: str, optimizer, num_warmup_steps: int):
    """Return a schedule as `get_scheduler` of transformers does, whose first parameter is its name."""
    assert name == "warm-up"
    return warmed_up(optimizer, num_warmup_steps)


def warmth(step: int, *, after: int) -> float:
    return min(1.0, step / after)


def test_a_function_that_makes_a_schedule_counts_updates_and_resumes():
    cfg = {"type": warmed_up, "num_warmup_steps": 4}
    optimizer = sgd()
    (schedule,) = build(optimizer, cfg, epochs=9, iters=90)
    assert not schedule.by_epoch
    assert course(optimizer, [schedule], 3) == [0.0, 0.25, 0.5]
    (named,) = build(sgd(), {"type": by_name, "name": "warm-up", "num_warmup_steps": 4}, epochs=9, iters=90)
    assert course(named.optimizer, [named], 3) == [0.0, 0.25, 0.5]
    (resumed,) = build(sgd(), cfg, epochs=9, iters=90)
    resumed.load_state_dict(json.loads(json.dumps(schedule.state_dict())))
    assert course(resumed.optimizer, [resumed], 3)[1:] == [1.0, 1.0]
    with pytest.raises(ConfigError, match="`type` must return an LRScheduler of torch's, but <lambda> does not"):
        build(sgd(), {"type": lambda optimizer: None}, epochs=9, iters=90)
    with pytest.raises(BuildError, match="did you mean `num_warmup_steps`"):
        build(sgd(), {"type": warmed_up, "num_warmup_step": 4}, epochs=9, iters=90)
