"""Early stopping."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lockstep.checkpoint.values import is_count
from lockstep.errors import (
    ConfigError,
    counted,
    metric_as_number,
    require_count,
    require_number,
    require_one_of,
    wrong_type,
)
from lockstep.hooks.arguments import RULES, check_metrics, not_saved_by, rule_of, unknown_metric
from lockstep.registry import HOOKS
from lockstep.runner.hook import Hook
from lockstep.runner.run import Run, TrainRun

_KEY = "early_stopping"


@HOOKS.register_module()
@dataclass(eq=False, repr=False)
class EarlyStoppingHook(Hook):
    """Stop training when a validation metric has not improved for some time.

    All ranks have the same metrics, so they stop at the same time. The best value and the number of validations since
    then are saved with checkpoints. A resumed run stops when a run without interruption would; a run that had stopped
    early stops again.

    Args:
        monitor: the name of the metric; of several validation sets, that of the set and the metric, as in
            `clean/accuracy`. It must be in the first validation.
        rule: whether `"greater"` or `"less"` is better; by default inferred from the metric's name.
        min_delta: a value counts as better only if it improves on the best one so far by more than this.
        strict: raise an error if a later validation lacks the metric; else skip it with a warning.
        check_finite: stop when the metric is infinite or not a number.
        patience: number of validations in a row without improvement after which training stops.
        stopping_threshold: stop as soon as the metric is better than this.
    """

    priority = "LOWEST"

    monitor: str
    rule: str | None = None
    min_delta: float = 0.1
    strict: bool = False
    check_finite: bool = True
    patience: int = 5
    stopping_threshold: float | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.monitor, str):
            raise wrong_type("monitor", "the name of one metric", self.monitor)
        require_one_of("rule", self.rule, RULES)
        require_count("patience", self.patience)
        require_number("min_delta", self.min_delta, 0)
        if self.stopping_threshold is not None:
            require_number("stopping_threshold", self.stopping_threshold)
        self.rule = self.rule or rule_of(self.monitor)
        self.best: float | None = None
        self.wait_count = 0  # validations since the best one
        self._has_found = False  # whether some validation had the metric
        self._has_warned = False  # of one without it
        self._is_training = self._is_resumed = False

    def before_train(self, runner: TrainRun) -> None:
        """Raise an error for a metric that there won't be; stop a run that resumes after it had stopped early."""
        check_metrics("monitor", [self.monitor], runner)
        self._is_training = True
        reason = self._reason_to_be_over() if self._is_resumed else None
        self._is_resumed = False
        if reason is not None and not runner.train_loop.ends_after_epoch:
            runner.train_loop.stop_training = True
            runner.logger.info("the training had stopped early, and does not go on: %s %s", self.monitor, reason)

    def close(self) -> None:
        """Pass over the validations that come after the training."""
        self._is_training = False

    def after_val_epoch(self, runner: Run, metrics: dict[str, Any] | None = None) -> None:
        """Compare the metric with the best one so far."""
        if not self._is_training:  # a validation without training, or after it
            return
        assert isinstance(runner, TrainRun)
        metrics = metrics or {}
        if self.monitor not in metrics:
            if not self._has_found:
                raise unknown_metric("monitor", self.monitor, metrics, runner)
            names = ", ".join(metrics) or "none"
            known = f"`monitor` must be a metric of each validation, but is {self.monitor!r}. This one has: {names}"
            if self.strict:
                raise ConfigError(f"{known}. Give strict=False to pass over validations without it")
            if not self._has_warned:
                runner.logger.warning("EarlyStoppingHook does nothing: %s", known)
            self._has_warned = True
            return
        self._has_found = True
        reason = self._reason_to_stop(metric_as_number("monitor", self.monitor, metrics[self.monitor]))
        if reason is not None:
            runner.train_loop.stop_training = True
            runner.logger.info("training stops early: %s %s", self.monitor, reason)

    def before_save_checkpoint(self, runner: TrainRun, checkpoint: dict[str, Any]) -> None:
        """Add the best value and the number of validations since then to the checkpoint."""
        by_metric = checkpoint["meta"].setdefault(_KEY, {})
        by_metric[self.monitor] = {"best": self.best, "wait_count": self.wait_count}

    def after_load_checkpoint(self, runner: TrainRun, checkpoint: dict[str, Any]) -> None:
        """Restore the best value and the number of validations since then."""
        saved = checkpoint["meta"].get(_KEY, {})
        if isinstance(saved, Mapping):
            saved = saved.get(self.monitor, {"best": None, "wait_count": 0})
        if (
            not isinstance(saved, Mapping)
            or not isinstance(saved.get("best"), float | int | None)
            or not is_count(saved.get("wait_count"))
        ):
            raise not_saved_by("EarlyStoppingHook", _KEY, saved)
        self.best, self.wait_count = saved["best"], saved["wait_count"]
        self._has_found = self.best is not None
        self._is_resumed = True

    def _reason_to_stop(self, value: float) -> str | None:
        if self.check_finite and not math.isfinite(value):
            return f"is {value}"
        is_first = not math.isnan(value) and self.best is None
        if (
            is_first
            or self._is_enough(value)
            or (self.best is not None and self._gain(value, self.best) > self.min_delta)
        ):
            self.best, self.wait_count = value, 0
        else:
            self.wait_count += 1
        return self._reason_to_be_over()

    def _is_enough(self, value: float) -> bool:
        return self.stopping_threshold is not None and self._gain(value, self.stopping_threshold) > 0

    def _reason_to_be_over(self) -> str | None:
        """Return why the training is over, by the best value and the number of validations since then."""
        if self.best is not None and self._is_enough(self.best):
            return f"is {self.best:g}, better than {self.stopping_threshold:g} (stopping_threshold)"
        if self.wait_count < self.patience:
            return None
        if self.best is None:
            return f"was not a number in {counted(self.patience, 'validation')}"
        return (
            f"has not improved on its best, {self.best:g}, by more than {self.min_delta:g} (min_delta) in "
            f"{counted(self.patience, 'validation')} (patience)"
        )

    def _gain(self, value: float, former: float) -> float:
        return value - former if self.rule == "greater" else former - value
