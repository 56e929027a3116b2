"""A hook that steps the schedulers of learning rates and momenta."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lockstep.errors import ConfigError
from lockstep.hooks.arguments import check_metrics
from lockstep.optim import ConstantLR, LinearLR, ParamScheduler, ReduceOnPlateauLR
from lockstep.registry import HOOKS
from lockstep.runner.hook import Hook
from lockstep.runner.run import Run, TrainRun

_FEW = 3  # iterations at a rate of 0 may be the last of a schedule, or the first of a warm-up
_PERIODIC = ("CosineAnnealingLR", "CosineAnnealingMomentum", "CosineAnnealingParamScheduler")


@HOOKS.register_module()
class ParamSchedulerHook(Hook):
    """Step iteration-based schedulers after each iteration, and the others after each epoch.

    A `ReduceOnPlateauLR` also receives the metrics of each validation.
    """

    priority = "LOW"

    _at_zero: int | None = None  # iterations in a row at rates of 0; None until a rate is above 0, as in a warm-up

    def before_train(self, runner: TrainRun) -> None:
        """Refuse a scheduler that waits for a plateau of what no validation computes; warn of one of another length."""
        check_metrics("monitor", [one.monitor for one in _on_plateau(runner)], runner)
        if others := [one for one in runner.param_schedulers if not isinstance(one, ParamScheduler)]:
            raise ConfigError(
                f"ParamSchedulerHook must be left out where the loop itself steps its {type(others[0]).__name__}, as "
                "that of a Session does"
            )
        for one in runner.param_schedulers:
            if isinstance(one, LinearLR | ConstantLR) and one.end == one.begin + 1 and one.multiplier(0) != 1:
                runner.logger.warning(
                    "%s multiplies the rates by %g at %d, and its window ends there (end=%d): they stay so. Give a "
                    "later end; for a warm-up within epochs, convert_to_iter_based=True, or by_epoch=False with an end "
                    "in iterations",
                    one.title, one.multiplier(0), one.begin, one.end,
                )  # fmt: skip
                continue
            if (ends := one.ramp_end) is None:
                continue
            unit, length, done = "iterations", runner.max_iters, runner.iter
            if one.by_epoch and runner.max_epochs is not None:
                unit, length, done = "epochs", runner.max_epochs, runner.epoch
            # By the schedule's own count, and not `done`: a resumed run may count batches of another size.
            last = done + ends - one.state_dict()[one.count_key]
            if last > length:
                runner.logger.warning(
                    "%s ends after %d %s, but the training after %d: the rates stop on their way. A schedule counts "
                    "epochs, or with by_epoch=False iterations",
                    one.title, last, unit, length,
                )  # fmt: skip
            elif one.title == "OneCycleLR" and last < length:
                runner.logger.warning(
                    "OneCycleLR ends after %d %s, but the training after %d: until then the rates stay at their last "
                    "value, which is far below the first. Leave out `total_steps`, which then is the length of the "
                    "training, or give more",
                    last, unit, length,
                )  # fmt: skip
            elif one.title in _PERIODIC and last < length and (one.end is None or one.end > ends):
                runner.logger.warning(
                    "%s is at its lowest after %d %s, and rises again until the training ends after %d. Leave out "
                    "`T_max`, which then is the length of the training, or give `end=%d`",
                    one.title, last, unit, length, ends,
                )  # fmt: skip

    def after_train_iter(self, runner: TrainRun, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        """Step the schedulers that count iterations."""
        by_iteration = [scheduler for scheduler in runner.param_schedulers if not scheduler.by_epoch]
        for scheduler in by_iteration:
            scheduler.step()
        if by_iteration:
            self._warn_of_zero(runner)

    def _warn_of_zero(self, runner: TrainRun) -> None:
        """Warn if the schedules have ended before the training: nothing is trained at a rate of 0."""
        rates = [group.get("lr") for group in runner.optim_wrapper.param_groups]
        if any(isinstance(rate, Tensor) or rate != 0 for rate in rates):  # a tensor may be on a device
            self._at_zero = 0
        elif self._at_zero is not None:
            self._at_zero += 1
        if self._at_zero == _FEW and (left := runner.max_iters - runner.iter - 1) > 0:
            runner.logger.warning(
                "the schedules have set all learning rates to 0, %d iterations before the last of %d: nothing is "
                "trained at that rate. A schedule by iterations counts batches, of which `accumulative_counts` make an "
                "update",
                left + _FEW - 1, runner.max_iters,
            )  # fmt: skip

    def after_train_epoch(self, runner: TrainRun) -> None:
        """Step the schedulers that count epochs."""
        for scheduler in runner.param_schedulers:
            if scheduler.by_epoch:
                scheduler.step()

    def after_val_epoch(self, runner: Run, metrics: dict[str, Any] | None = None) -> None:
        """Pass the metrics to the schedulers that wait for a plateau."""
        for scheduler in _on_plateau(runner):
            scheduler.observe(metrics or {})


def _on_plateau(runner: Run) -> list[ReduceOnPlateauLR]:
    return [scheduler for scheduler in runner.param_schedulers if isinstance(scheduler, ReduceOnPlateauLR)]
