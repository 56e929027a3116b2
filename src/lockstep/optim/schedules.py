"""Schedules of learning rates and momentum: each is a formula of the time since it began."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, ClassVar

from lockstep.errors import ConfigError
from lockstep.optim.scheduler import FloorScheduler, FormulaScheduler, for_momentum
from lockstep.registry import PARAM_SCHEDULERS


@PARAM_SCHEDULERS.register_module(name=["ConstantLR", "ConstantParamScheduler"])
@dataclass(eq=False, repr=False)
class ConstantLR(FormulaScheduler):
    """Multiply by `factor` for some time.

    Args:
        factor: by which the value is multiplied.
        total_iters: counts until it is itself again; by default in the last count of the window.
        **window: of `ParamScheduler`.
    """

    durations: ClassVar[tuple[str, ...]] = ("total_iters",)
    length: ClassVar[str | None] = "total_iters"
    length_less: ClassVar[int] = 1
    factor: float = 1 / 3
    total_iters: int | None = None

    def multiplier(self, t: int) -> float:
        """Return `factor`, then 1."""
        assert self.total_iters is not None
        return self.factor if t < self.total_iters else 1.0


@PARAM_SCHEDULERS.register_module(name=["LinearLR", "LinearParamScheduler"])
@dataclass(eq=False, repr=False)
class LinearLR(FormulaScheduler):
    """Multiply by a number that goes linearly from one to another, as a warm-up does.

    Args:
        start_factor: the number at the beginning.
        end_factor: the number at the end, and afterwards.
        total_iters: counts that it takes; by default it arrives in the last count of the window.
        **window: of `ParamScheduler`.
    """

    durations: ClassVar[tuple[str, ...]] = ("total_iters",)
    length: ClassVar[str | None] = "total_iters"
    length_less: ClassVar[int] = 1
    start_factor: float = 1 / 3
    end_factor: float = 1.0
    total_iters: int | None = None

    def __post_init__(self) -> None:
        if not 0 < self.start_factor <= 1 or not 0 <= self.end_factor <= 1:
            raise ConfigError(
                f"{self.title}: `start_factor` must be above 0 and, like `end_factor`, at most 1, but they are "
                f"{self.start_factor} and {self.end_factor}"
            )
        super().__post_init__()

    def multiplier(self, t: int) -> float:
        """Return a number on the line."""
        assert self.total_iters is not None
        if t >= self.total_iters:
            return self.end_factor
        return self.start_factor + (self.end_factor - self.start_factor) * t / self.total_iters


@PARAM_SCHEDULERS.register_module(name=["StepLR", "StepParamScheduler"])
@dataclass(eq=False, repr=False)
class StepLR(FormulaScheduler):
    """Multiply by `gamma` every `step_size` counts.

    Args:
        step_size: counts from one step to the next.
        gamma: by which each step multiplies.
        **window: of `ParamScheduler`.
    """

    durations: ClassVar[tuple[str, ...]] = ("step_size",)
    step_size: int
    gamma: float = 0.1

    def __post_init__(self) -> None:
        self.step_size = self._length("step_size")
        super().__post_init__()

    def multiplier(self, t: int) -> float:
        """Return the power of `gamma`."""
        return float(self.gamma ** (t // self.step_size))


@PARAM_SCHEDULERS.register_module(name=["MultiStepLR", "MultiStepParamScheduler"])
@dataclass(eq=False, repr=False)
class MultiStepLR(FormulaScheduler):
    """Multiply by `gamma` at each milestone.

    Args:
        milestones: counts since `begin`; one that is there twice counts twice.
        gamma: by which each multiplies.
        **window: of `ParamScheduler`.
    """

    durations: ClassVar[tuple[str, ...]] = ("milestones",)
    milestones: Sequence[int]
    gamma: float = 0.1

    def __post_init__(self) -> None:
        self.milestones = sorted(self.milestones)
        super().__post_init__()

    def multiplier(self, t: int) -> float:
        """Return the power of `gamma`."""
        return float(self.gamma ** bisect_right(self.milestones, t))


@PARAM_SCHEDULERS.register_module(name=["ExponentialLR", "ExponentialParamScheduler"])
@dataclass(eq=False, repr=False)
class ExponentialLR(FormulaScheduler):
    """Multiply by `gamma` at each count.

    Args:
        gamma: by which each multiplies.
        **window: of `ParamScheduler`.
    """

    gamma: float

    @classmethod
    def stretched(cls, arguments: Mapping[str, Any], epoch_length: int) -> dict[str, Any]:
        """Return arguments with which an epoch of batches multiplies as an epoch did."""
        stretched = super().stretched(arguments, epoch_length)
        if "gamma" in stretched:
            stretched["gamma"] **= 1 / epoch_length
        return stretched

    def multiplier(self, t: int) -> float:
        """Return the power of `gamma`."""
        return float(self.gamma**t)


@PARAM_SCHEDULERS.register_module(name=["CosineAnnealingLR", "CosineAnnealingParamScheduler"])
@dataclass(eq=False, repr=False)
class CosineAnnealingLR(FloorScheduler):
    """Fall along half a cosine.

    Args:
        T_max: counts until the floor is reached, after which it rises again; by default the length of the window.
        eta_min: the floor; by default 0.
        eta_min_ratio: the floor as a part of the first value, instead of `eta_min`.
        **window: of `ParamScheduler`.

    **Source**: Loshchilov and Hutter, SGDR (2016), equation 5, without restarts.
    """

    durations: ClassVar[tuple[str, ...]] = ("T_max",)
    length: ClassVar[str | None] = "T_max"
    T_max: int | None = None

    def multiplier(self, t: int) -> float:
        """Return the height of the cosine."""
        assert self.T_max is not None
        return (1 + math.cos(math.pi * t / self.T_max)) / 2


@PARAM_SCHEDULERS.register_module(name=["PolyLR", "PolyParamScheduler"])
@dataclass(eq=False, repr=False)
class PolyLR(FloorScheduler):
    """Fall along a polynomial.

    Args:
        power: 1 for a straight line.
        total_iters: counts until the floor is reached; by default in the last count of the window.
        eta_min: the floor; by default 0.
        eta_min_ratio: the floor as a part of the first value, instead of `eta_min`.
        **window: of `ParamScheduler`.
    """

    durations: ClassVar[tuple[str, ...]] = ("total_iters",)
    length: ClassVar[str | None] = "total_iters"
    length_less: ClassVar[int] = 1
    power: float = 1.0
    total_iters: int | None = None

    def multiplier(self, t: int) -> float:
        """Return the height of the polynomial."""
        assert self.total_iters is not None
        return float((1 - min(t, self.total_iters) / self.total_iters) ** self.power)


@PARAM_SCHEDULERS.register_module(name=["CosineRestartLR", "CosineRestartParamScheduler"])
@dataclass(eq=False, repr=False)
class CosineRestartLR(FloorScheduler):
    """Fall along half a cosine again and again; after the last time, stay at the floor.

    Args:
        periods: counts of each fall.
        restart_weights: by what the first value is multiplied at the beginning of each; by default 1.
        eta_min: the floor; by default 0.
        eta_min_ratio: the floor as a part of the first value, instead of `eta_min`.
        **window: of `ParamScheduler`.

    **Source**: Loshchilov and Hutter, SGDR (2016), equation 5.
    """

    durations: ClassVar[tuple[str, ...]] = ("periods",)
    periods: Sequence[int]
    restart_weights: Sequence[float] | None = None

    def __post_init__(self) -> None:
        if self.restart_weights is None:
            self.restart_weights = [1.0] * len(self.periods)
        if not self.periods or len(self.periods) != len(self.restart_weights) or min(self.periods) < 1:
            raise ConfigError(
                f"{self.title}: `periods` must be numbers of at least 1, with as many `restart_weights`, but they are "
                f"{list(self.periods)} and {list(self.restart_weights)}"
            )
        self._ends = list(accumulate(self.periods))
        super().__post_init__()

    def multiplier(self, t: int) -> float:
        """Return the height of the present cosine."""
        assert self.restart_weights is not None
        index = bisect_right(self._ends, t)
        if index == len(self.periods):
            return 0.0
        since = t - (self._ends[index] - self.periods[index])
        return self.restart_weights[index] * (1 + math.cos(math.pi * since / self.periods[index])) / 2


@PARAM_SCHEDULERS.register_module(name=["OneCycleLR", "OneCycleParamScheduler"])
@dataclass(eq=False, repr=False)
class OneCycleLR(FormulaScheduler):
    """Rise to a highest value, then fall far below the first one. Momentum stays as it is.

    Args:
        eta_max: the highest value, or a list with one for each parameter group.
        total_steps: counts that it takes; by default the length of the window.
        pct_start: the part of it that the rise takes.
        anneal_strategy: `"cos"` or `"linear"`.
        div_factor: the first value is that part of the highest one.
        final_div_factor: the last value is that part of the first one.
        three_phase: fall back to the first value in the time that the rise took, and to the last one afterwards.
        max_lr: torch's name for `eta_max`.
        **window: of `ParamScheduler`.

    **Source**: Smith and Topin, Super-Convergence (2017), as `torch.optim.lr_scheduler.OneCycleLR` does it.
    """

    durations: ClassVar[tuple[str, ...]] = ("total_steps",)
    length: ClassVar[str | None] = "total_steps"
    eta_max: float | Sequence[float] | None = None
    total_steps: int | None = None
    pct_start: float = 0.3
    anneal_strategy: str = "cos"
    div_factor: float = 25.0
    final_div_factor: float = 1e4
    three_phase: bool = False
    max_lr: float | Sequence[float] | None = None

    def __post_init__(self) -> None:
        if (self.eta_max is None) == (self.max_lr is None):
            raise ConfigError(f"{self.title}: `eta_max` must be given, or `max_lr`, which is its name in torch")
        if self.anneal_strategy not in ("cos", "linear") or not 0 <= self.pct_start <= 1:
            raise ConfigError(
                f"{self.title}: `anneal_strategy` must be 'cos' or 'linear' and `pct_start` between 0 and 1, but they "
                f"are {self.anneal_strategy!r} and {self.pct_start}"
            )
        self.eta_max = self.max_lr if self.eta_max is None else self.eta_max
        self.max_lr = None
        self.total_steps = self._length("total_steps")
        first, last = 1 / self.div_factor, 1 / (self.div_factor * self.final_div_factor)
        up = self.pct_start * self.total_steps - 1
        end = self.total_steps - 1
        # Where each phase ends, and at what part of the highest value.
        self._phases = [(up, 1.0), (2 * up, first), (end, last)] if self.three_phase else [(up, 1.0), (end, last)]
        self._first = first
        super().__post_init__()

    def first_values(self) -> list[float]:
        """Return the highest values."""
        groups = len(self.optimizer.param_groups)
        highest = list(self.eta_max) if isinstance(self.eta_max, Sequence) else [self.eta_max] * groups
        if len(highest) != groups:
            raise ConfigError(
                f"{self.title}: `eta_max` must be one number, or {groups}, one for each parameter group, but has "
                f"{len(highest)}"
            )
        return [float(value) for value in highest if value is not None]

    def multiplier(self, t: int) -> float:
        """Return the present part of the highest value."""
        begin, low = 0.0, self._first
        for end, high in self._phases:
            if t <= end:
                return self._between(low, high, (t - begin) / (end - begin) if end > begin else 1.0)
            begin, low = end, high
        return low

    def _between(self, start: float, end: float, part: float) -> float:
        if self.anneal_strategy == "linear":
            return start + (end - start) * part
        return end + (start - end) * (1 + math.cos(math.pi * part)) / 2


ConstantMomentum = for_momentum(ConstantLR)
CosineAnnealingMomentum = for_momentum(CosineAnnealingLR)
CosineRestartMomentum = for_momentum(CosineRestartLR)
ExponentialMomentum = for_momentum(ExponentialLR)
LinearMomentum = for_momentum(LinearLR)
MultiStepMomentum = for_momentum(MultiStepLR)
PolyMomentum = for_momentum(PolyLR)
StepMomentum = for_momentum(StepLR)
