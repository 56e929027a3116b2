"""`ReduceOnPlateauLR`: a schedule that follows a validation metric."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from lockstep.errors import ConfigError, did_you_mean, require_one_of
from lockstep.optim.scheduler import ParamScheduler, for_momentum, for_rates


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
        require_one_of("rule", self.rule, ("less", "greater"))
        require_one_of("threshold_rule", self.threshold_rule, ("rel", "abs"))
        if not 0 <= self.factor < 1:
            raise ConfigError(f"{self.title}: `factor` must be at least 0 and less than 1, but is {self.factor}")
        self._best: float | None = None
        self._bad = 0
        self._cooling = 0
        super().__post_init__()

    def advance(self, t: int) -> None:
        """Do nothing: only `observe` changes the values."""

    def observe(self, metrics: Mapping[str, Any]) -> None:
        """Compare the metrics of a validation, and reduce the values if the patience is exhausted.

        Raises:
            ConfigError: `metrics` does not have the metric.
        """
        if self.monitor not in metrics:
            raise ConfigError(
                f"{self.title}: `monitor` must be a metric of the validation, but is {self.monitor!r}"
                f"{did_you_mean(self.monitor, metrics)}"
            )
        if not self.is_active:
            return
        value = float(metrics[self.monitor])
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
