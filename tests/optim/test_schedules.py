"""Each schedule against torch's own of that name, and against its formula."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import nn
from torch.optim import lr_scheduler

from lockstep import optim
from lockstep.optim import (
    ConstantLR,
    ConstantMomentum,
    CosineAnnealingLR,
    CosineAnnealingMomentum,
    CosineRestartLR,
    CosineRestartMomentum,
    ExponentialLR,
    ExponentialMomentum,
    LinearLR,
    LinearMomentum,
    MultiStepLR,
    MultiStepMomentum,
    OneCycleLR,
    OptimWrapper,
    PolyLR,
    PolyMomentum,
    StepLR,
    StepMomentum,
    TorchScheduler,
)
from lockstep.registry import PARAM_SCHEDULERS

COUNTS = 40
FACTORS = st.floats(0.01, 1.0)
LENGTHS = st.integers(1, 50)


def sgd(**options) -> torch.optim.SGD:
    """Two groups with different rates."""
    params = [{"params": [nn.Parameter(torch.zeros(1))], "lr": lr} for lr in (0.5, 3.0)]
    return torch.optim.SGD(params, momentum=0.8, **options)


def course(optimizer, scheduler, counts: int = COUNTS, name: str = "lr") -> list[list[float]]:
    values = []
    for _ in range(counts):
        values.append([group[name] for group in optimizer.param_groups])
        optimizer.step()
        scheduler.step()
    return values


def assert_alike(kind, torchs, ours: dict, theirs: dict | None = None) -> None:
    mine, other = sgd(), sgd()
    values = course(mine, kind(mine, by_epoch=False, **ours))
    expected = course(other, torchs(other, **(ours if theirs is None else theirs)))
    for value, reference in zip(values, expected, strict=True):
        # The sums of torch's recursive form are off by their rounding errors.
        assert value == pytest.approx(reference, rel=1e-9, abs=1e-12)


@given(factor=FACTORS, total_iters=LENGTHS)
def test_constant(factor, total_iters):
    assert_alike(ConstantLR, lr_scheduler.ConstantLR, {"factor": factor, "total_iters": total_iters})


@given(start=FACTORS, end=FACTORS, total_iters=LENGTHS)
def test_linear(start, end, total_iters):
    kwargs = {"start_factor": start, "end_factor": end, "total_iters": total_iters}
    assert_alike(LinearLR, lr_scheduler.LinearLR, kwargs)


@given(step_size=LENGTHS, gamma=FACTORS)
def test_step(step_size, gamma):
    assert_alike(StepLR, lr_scheduler.StepLR, {"step_size": step_size, "gamma": gamma})


@given(milestones=st.lists(LENGTHS, max_size=6), gamma=FACTORS)
def test_multi_step(milestones, gamma):
    assert_alike(MultiStepLR, lr_scheduler.MultiStepLR, {"milestones": milestones, "gamma": gamma})


@given(gamma=FACTORS)
def test_exponential(gamma):
    assert_alike(ExponentialLR, lr_scheduler.ExponentialLR, {"gamma": gamma})


@given(t_max=st.integers(2, 50), eta_min=st.floats(0, 0.4))
def test_cosine_annealing_also_after_its_end(t_max, eta_min):
    def formula(t: int, first: float) -> float:
        return eta_min + (first - eta_min) * (1 + math.cos(math.pi * t / t_max)) / 2

    optimizer = sgd()
    values = course(optimizer, CosineAnnealingLR(optimizer, t_max, eta_min=eta_min))
    assert torch.tensor(values, dtype=torch.float64).allclose(
        torch.tensor([[formula(t, first) for first in (0.5, 3.0)] for t in range(COUNTS)], dtype=torch.float64)
    )
    if t_max > COUNTS:  # torch's recursive form loses precision where it passes through its floor
        kwargs = {"T_max": t_max, "eta_min": eta_min}
        assert_alike(CosineAnnealingLR, lr_scheduler.CosineAnnealingLR, kwargs)


@given(power=st.floats(0.5, 3), total_iters=LENGTHS)
def test_poly(power, total_iters):
    assert_alike(PolyLR, lr_scheduler.PolynomialLR, {"power": power, "total_iters": total_iters})


def test_poly_and_cosine_have_floors():
    for floor, lowest in (({"eta_min": 0.1}, [0.1, 0.1]), ({"eta_min_ratio": 0.1}, [0.05, 0.3])):
        for kind in (PolyLR(sgd(), total_iters=8, **floor), CosineAnnealingLR(sgd(), T_max=8, **floor)):
            values = course(kind.optimizer, kind, 9)
            assert values[0] == [0.5, 3.0]
            assert values[8] == pytest.approx(lowest)


def test_a_schedule_of_torchs_that_sets_the_first_rate_itself_begins_with_it():
    mine, other = sgd(), sgd()
    options = {"base_lr": 0.001, "max_lr": 0.1, "step_size_up": 3}
    values = course(mine, TorchScheduler(lr_scheduler.CyclicLR, mine, by_epoch=False, **options), 9)
    assert values == course(other, lr_scheduler.CyclicLR(other, **options), 9)
    assert values[0] == [0.001, 0.001]


@given(
    total=st.integers(5, 60), pct_start=st.floats(0.1, 0.5), three_phase=st.booleans(),
    anneal=st.sampled_from(["cos", "linear"]), div=st.floats(1.5, 50), final=st.floats(2, 1e4),
)  # fmt: skip
def test_one_cycle(total, pct_start, three_phase, anneal, div, final):
    assume(pct_start * total != 1)  # where torch (2.13) divides by zero
    kwargs = {
        "total_steps": total, "pct_start": pct_start, "three_phase": three_phase, "anneal_strategy": anneal,
        "div_factor": div, "final_div_factor": final,
    }  # fmt: skip
    mine, other = sgd(), sgd()
    values = course(mine, OneCycleLR(mine, [0.5, 2.0], **kwargs), total - 1)
    reference = lr_scheduler.OneCycleLR(other, [0.5, 2.0], cycle_momentum=False, **kwargs)
    assert torch.tensor(values).allclose(torch.tensor(course(other, reference, total - 1)))
    assert mine.param_groups[0]["momentum"] == 0.8


def test_one_cycle_stays_at_its_end_and_knows_torchs_argument():
    optimizer = sgd()
    scheduler = OneCycleLR(optimizer, max_lr=1.0, end=10)
    assert repr(scheduler).startswith("OneCycleLR(epochs 0..10, eta_max=1.0, total_steps=10, ")
    values = course(optimizer, scheduler, 14)
    assert values[9] == pytest.approx([1 / 25e4] * 2)
    assert values[13] == values[9]


@given(period=st.integers(2, 12), eta_min=st.floats(0, 0.4))
def test_cosine_restart(period, eta_min):
    assert_alike(
        CosineRestartLR, lr_scheduler.CosineAnnealingWarmRestarts,
        {"periods": [period] * 20, "eta_min": eta_min}, {"T_0": period, "eta_min": eta_min},
    )  # fmt: skip


def test_cosine_restart_has_weights_and_an_end():
    optimizer = sgd()
    values = course(optimizer, CosineRestartLR(optimizer, [2, 4], [1, 0.5], eta_min=0.1), 8)
    assert [value[0] for value in values] == pytest.approx(
        [0.5, 0.3, 0.3, 0.1 + 0.4 * 0.5 * (1 + math.cos(math.pi / 4)) / 2, 0.2,
         0.1 + 0.4 * 0.5 * (1 + math.cos(3 * math.pi / 4)) / 2, 0.1, 0.1]
    )  # fmt: skip


@given(
    kinds=st.permutations(["step", "exponential", "linear"]), begin=st.integers(0, 10), step=st.integers(1, 10),
)  # fmt: skip
def test_overlapping_schedules_multiply(kinds, begin, step):
    optimizer = sgd()
    make = {
        "step": lambda: StepLR(optimizer, step, 0.5),
        "exponential": lambda: ExponentialLR(optimizer, 0.9, begin=begin),
        "linear": lambda: LinearLR(optimizer, 0.1, total_iters=15),
    }
    schedulers = [make[kind]() for kind in kinds]
    for t in range(1, 30):
        for scheduler in schedulers:
            scheduler.step()
        expected = 0.5 ** (t // step) * 0.9 ** max(t - begin, 0) * min(0.1 + 0.9 * t / 15, 1)
        assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.5 * expected, 3.0 * expected])


def test_alone_a_schedule_does_not_drift():
    optimizer = sgd()
    scheduler = LinearLR(optimizer, 1e-3, total_iters=100_000)
    for _ in range(100_000):
        scheduler.step()
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 3.0]


def test_a_value_changed_by_hand_is_gone_on_from():
    optimizer = sgd()
    scheduler = ExponentialLR(optimizer, 0.5)
    scheduler.step()
    optimizer.param_groups[0]["lr"] = 8.0
    scheduler.step()
    assert [group["lr"] for group in optimizer.param_groups] == [4.0, 0.75]


MOMENTA = {
    ConstantMomentum: {"total_iters": 3},
    CosineAnnealingMomentum: {"T_max": 7, "eta_min": 0.1},
    CosineRestartMomentum: {"periods": [3, 4]},
    ExponentialMomentum: {"gamma": 0.9},
    LinearMomentum: {"total_iters": 5},
    MultiStepMomentum: {"milestones": [2]},
    PolyMomentum: {"total_iters": 5},
    StepMomentum: {"step_size": 2},
}


@pytest.mark.parametrize("kind", MOMENTA)
@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW])
def test_momentum_goes_as_a_learning_rate_would(kind, make):
    """Adam's first beta is its momentum; learning rate and second beta stay."""
    kwargs = MOMENTA[kind]
    momentum = {"momentum": 0.8} if make is torch.optim.SGD else {"betas": (0.8, 0.99)}
    optimizer = make([nn.Parameter(torch.zeros(1))], lr=0.25, **momentum)
    rated = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.8)
    values, scheduler = [], kind(optimizer, **kwargs)
    for _ in range(10):
        group = optimizer.param_groups[0]
        values.append(group["momentum"] if "momentum" in group else group["betas"][0])
        scheduler.step()
    by_rate = getattr(optim, kind.__name__.replace("Momentum", "LR"))(rated, **kwargs)
    assert values == [value for (value,) in course(rated, by_rate, 10)]
    assert len(set(values)) > 1
    assert optimizer.param_groups[0]["lr"] == 0.25
    if make is torch.optim.AdamW:
        assert optimizer.param_groups[0]["betas"][1] == 0.99


def test_what_is_in_a_tensor_stays_in_it():
    rate, first, second = torch.tensor(0.5), torch.tensor(0.5), torch.tensor(0.99)
    optimizer = torch.optim.Adam([nn.Parameter(torch.zeros(1))], lr=rate, betas=(first, second), foreach=False)
    group = optimizer.param_groups[0]
    later = {"schedule": torch.optim.lr_scheduler.LinearLR, "by_epoch": False, "begin": 7, "total_iters": 2}
    schedulers = [ExponentialLR(optimizer, 0.1), ExponentialMomentum(optimizer, 0.1, end=6)]
    schedulers.append(TorchScheduler(optimizer=optimizer, **later))
    for _ in range(5):
        for scheduler in schedulers:
            scheduler.step()
    assert group["lr"] is rate
    assert group["betas"][0] is first
    assert rate.item() == first.item() == pytest.approx(0.5e-5)
    rate.mul_(100)  # by the user, which no schedule knows of
    for _ in range(2):
        for scheduler in schedulers:
            scheduler.step()
    assert OptimWrapper(optimizer).get_lr() == {"lr": [rate.item()]}
    assert rate.item() == pytest.approx(0.5e-5 / 3)  # as torch's begins
    assert group["initial_lr"].item() == pytest.approx(0.5e-5)


def test_the_names_are_known():
    for name in optim.__all__:
        if name.endswith(("LR", "Momentum")):
            assert PARAM_SCHEDULERS[name] is getattr(optim, name)
    # What MMEngine calls them where any number may be meant.
    assert PARAM_SCHEDULERS["CosineAnnealingParamScheduler"] is CosineAnnealingLR
    optimizer = sgd(weight_decay=0.4)
    scheduler = PARAM_SCHEDULERS["LinearParamScheduler"](optimizer, 0.5, total_iters=1, param_name="weight_decay")
    assert course(optimizer, scheduler, 3, "weight_decay") == [[0.2, 0.2], [0.4, 0.4], [0.4, 0.4]]
