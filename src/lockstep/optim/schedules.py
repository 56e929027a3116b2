"""Schedules of learning rates and momentum: formulas of the time since they began, and one that follows a metric."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from lockstep.errors import ConfigError, did_you_mean, metric_as_number, require_one_of, wrong_type
from lockstep.optim.scheduler import (
    WINDOW,
    FloorScheduler,
    FormulaScheduler,
    ParamScheduler,
    for_momentum,
    for_rates,
    is_in_range,
)


@for_rates
class ConstantLR(FormulaScheduler):
    """Multiply the value by `factor` for the first `total_iters` counts.

    Args:
        factor: the factor.
        total_iters: counts until the value returns; by default it does in the last count of the window.
        **window: arguments of `ParamScheduler`.
    """

    factor: float = 1 / 3
    total_iters: int = WINDOW

    def __post_init__(self) -> None:
        self._require("factor")
        super().__post_init__()

    def multiplier(self, t: int) -> float:
        """Return `factor`, then 1."""
        return self.factor if t < self.total_iters else 1.0

    def _ramp_length(self) -> None:  # a step is no ramp
        return None


@for_rates
class LinearLR(FormulaScheduler):
    """Multiply the value by a factor that changes linearly, as in a warm-up.

    Args:
        start_factor: the factor at the beginning, above 0 and at most 1.
        end_factor: the factor at the end, and afterwards, at most 1.
        total_iters: counts until `end_factor`; by default it is reached in the last count of the window.
        **window: arguments of `ParamScheduler`.
    """

    start_factor: float = 1 / 3
    end_factor: float = 1.0
    total_iters: int = WINDOW

    def __post_init__(self) -> None:
        self._require("start_factor", "end_factor")
        if not 0 < self.start_factor <= 1 or not 0 <= self.end_factor <= 1:
            raise ConfigError(
                f"{self.title}: `start_factor` must be above 0 and, like `end_factor`, at most 1, but they are "
                f"{self.start_factor} and {self.end_factor}"
            )
        super().__post_init__()

    def multiplier(self, t: int) -> float:
        """Return the factor after `t` counts."""
        if t >= self.total_iters:
            return self.end_factor
        return self.start_factor + (self.end_factor - self.start_factor) * t / self.total_iters


@for_rates
class StepLR(FormulaScheduler):
    """Multiply the value by `gamma` every `step_size` counts.

    Args:
        step_size: counts between two multiplications.
        gamma: the factor.
        **window: arguments of `ParamScheduler`.
    """

    step_size: int
    gamma: float = 0.1

    def __post_init__(self) -> None:
        self._require("gamma")
        self._require("step_size", above_0=True)
        super().__post_init__()

    def multiplier(self, t: int) -> float:
        """Return the power of `gamma`."""
        return float(self.gamma ** (t // self.step_size))


@for_rates
class MultiStepLR(FormulaScheduler):
    """Multiply the value by `gamma` at each milestone.

    Args:
        milestones: counts since `begin`; a milestone that is listed twice counts twice.
        gamma: the factor.
        **window: arguments of `ParamScheduler`.
    """

    milestones: Sequence[int]
    gamma: float = 0.1

    def __post_init__(self) -> None:
        self._require("gamma")
        self._require_list("milestones")
        self.milestones = sorted(self.milestones)
        super().__post_init__()

    def multiplier(self, t: int) -> float:
        """Return the power of `gamma`."""
        return float(self.gamma ** bisect_right(self.milestones, t))


@for_rates
class ExponentialLR(FormulaScheduler):
    """Multiply the value by `gamma` at each count.

    Args:
        gamma: the factor.
        **window: arguments of `ParamScheduler`.
    """

    gamma: float

    def __post_init__(self) -> None:
        self._require("gamma")
        super().__post_init__()

    @classmethod
    def stretched(cls, arguments: Mapping[str, Any], epoch_length: int) -> dict[str, Any]:
        """Return the arguments, converted to batches: the factors of one epoch's batches multiply to `gamma`."""
        stretched = super().stretched(arguments, epoch_length)
        if is_in_range(stretched.get("gamma")):  # what is not is refused when the schedule is made
            stretched["gamma"] **= 1 / epoch_length
        return stretched

    def multiplier(self, t: int) -> float:
        """Return the power of `gamma`."""
        return float(self.gamma**t)


@for_rates
class CosineAnnealingLR(FloorScheduler):
    """Fall along half a cosine.

    Args:
        T_max: counts until the floor, after which the value rises again; by default the length of the window.
        eta_min: the floor; by default 0.
        eta_min_ratio: the floor as a fraction of the first value, instead of `eta_min`.
        **window: arguments of `ParamScheduler`.

    **Source**: Loshchilov and Hutter, SGDR (2016), equation 5, without restarts.
    """

    T_max: int = WINDOW

    def multiplier(self, t: int) -> float:
        """Return the height of the cosine."""
        return (1 + math.cos(math.pi * t / self.T_max)) / 2


@for_rates
class PolyLR(FloorScheduler):
    """Fall along a polynomial.

    Args:
        power: 1 for a straight line.
        total_iters: counts until the floor; by default it is reached in the last count of the window.
        eta_min: the floor; by default 0.
        eta_min_ratio: the floor as a fraction of the first value, instead of `eta_min`.
        **window: arguments of `ParamScheduler`.
    """

    power: float = 1.0
    total_iters: int = WINDOW

    def __post_init__(self) -> None:
        self._require("power")
        super().__post_init__()

    def multiplier(self, t: int) -> float:
        """Return the height of the polynomial."""
        return float((1 - min(t, self.total_iters) / self.total_iters) ** self.power)


@for_rates
class CosineRestartLR(FloorScheduler):
    """Fall along half a cosine repeatedly; after the last period, stay at the floor.

    Args:
        periods: counts of each period.
        restart_weights: the factor of the first value at the start of each period; by default 1.
        eta_min: the floor; by default 0.
        eta_min_ratio: the floor as a fraction of the first value, instead of `eta_min`.
        **window: arguments of `ParamScheduler`.

    **Source**: Loshchilov and Hutter, SGDR (2016), equation 5.
    """

    periods: Sequence[int]
    restart_weights: Sequence[float] | None = None

    def __post_init__(self) -> None:
        self._require_list("periods")
        if self.restart_weights is None:
            self.restart_weights = [1.0] * len(self.periods)
        self._require_list("restart_weights")
        if not self.periods or len(self.periods) != len(self.restart_weights) or min(self.periods) < 1:
            raise ConfigError(
                f"{self.title}: `periods` must be numbers of at least 1, with as many `restart_weights`, but they are "
                f"{self.periods} and {self.restart_weights}"
            )
        self._falls = list(zip(self.periods, self.restart_weights, strict=True))
        super().__post_init__()

    def multiplier(self, t: int) -> float:
        """Return the height of the current cosine."""
        for period, weight in self._falls:
            if t < period:
                return weight * (1 + math.cos(math.pi * t / period)) / 2
            t -= period
        return 0.0

    def _ramp_length(self) -> int:
        return sum(self.periods)


@for_rates
class OneCycleLR(FormulaScheduler):
    """Rise to a highest value, then fall far below the first value. Momentum does not change.

    Args:
        eta_max: the highest value, or a list with one for each parameter group.
        total_steps: length of the schedule in counts; by default the length of the window.
        pct_start: the fraction of the schedule that the rise takes.
        anneal_strategy: `"cos"` or `"linear"`.
        div_factor: the first value is the highest value divided by this.
        final_div_factor: the last value is the first value divided by this.
        three_phase: fall to the first value in as many counts as the rise took, and then to the last value.
        max_lr: torch's name for `eta_max`.
        **window: arguments of `ParamScheduler`.

    **Source**: Smith and Topin, Super-Convergence (2017), as in `torch.optim.lr_scheduler.OneCycleLR`.
    """

    eta_max: float | Sequence[float] | None = None
    total_steps: int = WINDOW
    pct_start: float = 0.3
    anneal_strategy: str = "cos"
    div_factor: float = 25.0
    final_div_factor: float = 1e4
    three_phase: bool = False
    max_lr: float | Sequence[float] | None = None

    def __post_init__(self) -> None:
        if (self.eta_max is None) == (self.max_lr is None):
            raise ConfigError(f"{self.title}: `eta_max` must be given, or `max_lr`, which is its name in torch")
        self._require("pct_start")
        self._require("div_factor", "final_div_factor", above_0=True)
        if self.anneal_strategy not in ("cos", "linear") or not 0 <= self.pct_start <= 1:
            raise ConfigError(
                f"{self.title}: `anneal_strategy` must be 'cos' or 'linear' and `pct_start` between 0 and 1, but they "
                f"are {self.anneal_strategy!r} and {self.pct_start}"
            )
        self.eta_max = self.max_lr if self.eta_max is None else self.eta_max
        self.max_lr = None
        self._require_list("eta_max", or_one=True)
        super().__post_init__()
        self._by_group("eta_max")  # so that a wrong number of them is refused now, not when the schedule begins

    def first_values(self) -> list[float]:
        """Return the highest values."""
        return [float(value) for value in self._by_group("eta_max")]

    def multiplier(self, t: int) -> float:
        """Return the current fraction of the highest value."""
        first, last = 1 / self.div_factor, 1 / (self.div_factor * self.final_div_factor)
        rise, whole = self.pct_start * self.total_steps - 1, self.total_steps - 1
        # The end of each phase, and the fraction of the highest value there.
        phases = [(rise, 1.0), (2 * rise, first), (whole, last)] if self.three_phase else [(rise, 1.0), (whole, last)]
        begin, present = 0.0, first
        for end, target in phases:
            if t <= end:
                return self._between(present, target, (t - begin) / (end - begin) if end > begin else 1.0)
            begin, present = end, target
        return present

    def _between(self, start: float, end: float, part: float) -> float:
        if self.anneal_strategy == "linear":
            return start + (end - start) * part
        return end + (start - end) * (1 + math.cos(math.pi * part)) / 2


ConstantMomentum = for_momentum(ConstantLR)
"""`ConstantLR` for momentum; for Adam, the first beta."""
CosineAnnealingMomentum = for_momentum(CosineAnnealingLR)
"""`CosineAnnealingLR` for momentum; for Adam, the first beta."""
CosineRestartMomentum = for_momentum(CosineRestartLR)
"""`CosineRestartLR` for momentum; for Adam, the first beta."""
ExponentialMomentum = for_momentum(ExponentialLR)
"""`ExponentialLR` for momentum; for Adam, the first beta."""
LinearMomentum = for_momentum(LinearLR)
"""`LinearLR` for momentum; for Adam, the first beta."""
MultiStepMomentum = for_momentum(MultiStepLR)
"""`MultiStepLR` for momentum; for Adam, the first beta."""
PolyMomentum = for_momentum(PolyLR)
"""`PolyLR` for momentum; for Adam, the first beta."""
StepMomentum = for_momentum(StepLR)
"""`StepLR` for momentum; for Adam, the first beta."""


@for_rates
class ReduceOnPlateauLR(ParamScheduler):
    """Multiply the value by `factor` when a validation metric has stopped improving.

    All ranks see the same metrics and so set the same values. Validations outside the window from `begin` to `end` do
    not count.

    Args:
        monitor: the name of the metric.
        rule: whether `"less"` or `"greater"` is better.
        factor: the factor of one reduction.
        patience: number of validations in a row without improvement that are tolerated.
        threshold: how much better than the best value so far a metric must be to count as an improvement.
        threshold_rule: `"rel"` if `threshold` is a fraction of the best value, `"abs"` if it is a difference.
        cooldown: number of validations after a reduction that do not count.
        min_value: the lower bound of the value; a number, or a list with one for each parameter group.
        eps: reductions of at most `eps` are not made.
        **window: arguments of `ParamScheduler`.

    **Source**: behaves as `torch.optim.lr_scheduler.ReduceLROnPlateau` (2.13).
    """

    kept: ClassVar[tuple[str, ...]] = ("count", "best", "bad", "cooling")

    monitor: str = "loss"
    rule: str = "less"
    factor: float = 0.1
    patience: int = 10
    threshold: float = 1e-4
    threshold_rule: str = "rel"
    cooldown: int = 0
    min_value: float | Sequence[float] = 0.0
    eps: float = 1e-8

    def __post_init__(self) -> None:
        if not isinstance(self.monitor, str):
            raise wrong_type("monitor", "the name of one metric", self.monitor)
        require_one_of("rule", self.rule, ("less", "greater"))
        require_one_of("threshold_rule", self.threshold_rule, ("rel", "abs"))
        self._require("factor", "patience", "threshold", "cooldown", "eps")
        self._require_list("min_value", or_one=True)
        if not 0 <= self.factor < 1:
            raise ConfigError(f"{self.title}: `factor` must be at least 0 and less than 1, but is {self.factor}")
        self._best: float | None = None
        self._bad = 0
        self._cooling = 0
        super().__post_init__()
        self._by_group("min_value")  # so that a wrong number of them is refused now, not by the first reduction

    def advance(self, t: int) -> None:
        """Do nothing: only `observe` changes the values."""

    def observe(self, metrics: Mapping[str, Any]) -> None:
        """Compare the metrics of a validation, and reduce the values if the patience is exhausted.

        Raises:
            ConfigError: `metrics` does not have the metric, or it is not one number.
        """
        if self.monitor not in metrics:
            raise ConfigError(
                f"{self.title}: `monitor` must be a metric of the validation, but is {self.monitor!r}"
                f"{did_you_mean(self.monitor, metrics)}"
            )
        if not self.is_active:
            return
        value = metric_as_number("monitor", self.monitor, metrics[self.monitor])
        if self._is_better(value, self._best):
            self._best, self._bad = value, 0
        else:
            self._bad += 1
        if self._cooling > 0:
            self._cooling -= 1
            self._bad = 0
        if self._bad > self.patience:
            self._reduce()
            self._cooling = self.cooldown
            self._bad = 0

    def _is_better(self, value: float, best: float | None) -> bool:
        sign = -1 if self.rule == "less" else 1
        if best is None:
            return sign * value > -math.inf  # False for NaN
        step = sign * self.threshold
        return sign * value > sign * (best * (1 + step) if self.threshold_rule == "rel" else best + step)

    def _reduce(self) -> None:
        values = self.get_last_value()
        reduced = [
            max(value * self.factor, low) for value, low in zip(values, self._by_group("min_value"), strict=True)
        ]
        self.set_values([new if old - new > self.eps else old for old, new in zip(values, reduced, strict=True)])


ReduceOnPlateauMomentum = for_momentum(ReduceOnPlateauLR)
"""`ReduceOnPlateauLR` for momentum; for Adam, the first beta."""
