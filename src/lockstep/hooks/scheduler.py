"""A hook that steps the schedulers of learning rates and momenta."""

from __future__ import annotations

from typing import Any

from lockstep.errors import ConfigError
from lockstep.optim import ReduceOnPlateauLR
from lockstep.registry import HOOKS
from lockstep.runner.hook import Hook
from lockstep.runner.run import Run, TrainRun


@HOOKS.register_module()
class ParamSchedulerHook(Hook):
    """Step iteration-based schedulers after each iteration, and the others after each epoch.

    A `ReduceOnPlateauLR` also receives the metrics of each validation.
    """

    priority = "LOW"

    def before_train(self, runner: TrainRun) -> None:
        """Raise an error if a scheduler waits for a plateau but nothing is validated."""
        waiting = _waiting(runner)
        if waiting and runner.val_loop is None:
            raise ConfigError(
                f"`param_scheduler` must not have a {waiting[0].title} without a validation, whose metric "
                f"{waiting[0].monitor!r} it waits for. Give `val_dataloader` and `val_evaluator`"
            )

    def after_train_iter(self, runner: TrainRun, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        """Step the schedulers that count iterations."""
        for scheduler in runner.param_schedulers:
            if not scheduler.by_epoch:
                scheduler.step()

    def after_train_epoch(self, runner: TrainRun) -> None:
        """Step the schedulers that count epochs."""
        for scheduler in runner.param_schedulers:
            if scheduler.by_epoch:
                scheduler.step()

    def after_val_epoch(self, runner: Run, metrics: dict[str, Any] | None = None) -> None:
        """Pass the metrics to the schedulers that wait for a plateau."""
        for scheduler in _waiting(runner):
            scheduler.observe(metrics or {})


def _waiting(runner: Run) -> list[ReduceOnPlateauLR]:
    return [scheduler for scheduler in runner.param_schedulers if isinstance(scheduler, ReduceOnPlateauLR)]
