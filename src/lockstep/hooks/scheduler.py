"""Learning rates and momenta that follow their schedules."""

from __future__ import annotations

from typing import Any

from lockstep.errors import ConfigError
from lockstep.hooks.hook import Hook
from lockstep.hooks.host import RunnerLike
from lockstep.optim import ReduceOnPlateauLR
from lockstep.registry import HOOKS

_KEY = "param_scheduler_hook"


@HOOKS.register_module()
class ParamSchedulerHook(Hook):
    """Step the schedulers that count iterations after each, the others after each epoch.

    A `ReduceOnPlateauLR` sees the metrics of each validation, too. A checkpoint is written before the validation that
    is due at its time; a run with such a scheduler that goes on from it makes up for that validation first.
    """

    priority = "LOW"

    def __init__(self) -> None:
        self._validated_iter: int | None = None
        self._owes_validation = False

    def before_train(self, runner: RunnerLike) -> None:
        """Refuse to wait for a plateau that nobody would see."""
        waiting = _waiting(runner)
        if waiting and getattr(runner, "val_loop", None) is None:
            raise ConfigError(
                f"`param_scheduler` must not have a {waiting[0].title} without a validation, whose metric "
                f"{waiting[0].monitor!r} it waits for. Give `val_dataloader` and `val_evaluator`"
            )

    def before_train_epoch(self, runner: RunnerLike) -> None:
        """Make up for a validation whose metrics the checkpoint lacks."""
        if self._owes_validation and _waiting(runner):
            runner.logger.info("the validation that was due after the checkpoint is made up for")
            validation: Any = getattr(runner, "val_loop", None)
            validation.run()
        self._owes_validation = False

    def after_train_iter(
        self,
        runner: RunnerLike,
        batch_idx: int,
        data_batch: Any = None,
        outputs: dict[str, Any] | None = None,
    ) -> None:
        """Step the schedulers that count iterations."""
        for scheduler in runner.param_schedulers:
            if not scheduler.by_epoch:
                scheduler.step()

    def after_train_epoch(self, runner: RunnerLike) -> None:
        """Step the schedulers that count epochs."""
        for scheduler in runner.param_schedulers:
            if scheduler.by_epoch:
                scheduler.step()

    def after_val_epoch(self, runner: RunnerLike, metrics: dict[str, Any] | None = None) -> None:
        """Show the metrics to the schedulers that wait for a plateau."""
        self._validated_iter = runner.iter
        for scheduler in _waiting(runner):
            scheduler.observe(metrics or {})

    def before_save_checkpoint(self, runner: RunnerLike, checkpoint: dict[str, Any]) -> None:
        """Note which validation was the last."""
        checkpoint["meta"][_KEY] = {"validated_iter": self._validated_iter}

    def after_load_checkpoint(self, runner: RunnerLike, checkpoint: dict[str, Any]) -> None:
        """Find out whether the metrics of a validation are missing."""
        meta = checkpoint["meta"]
        self._validated_iter = meta.get(_KEY, {}).get("validated_iter")
        loop: Any = runner.train_loop
        done = runner.iter if runner.max_epochs is None else runner.epoch
        was_due = done >= loop.val_begin and done % loop.val_interval == 0 and meta["batches_into_epoch"] == 0
        self._owes_validation = was_due and self._validated_iter != meta["iter"]


def _waiting(runner: RunnerLike) -> list[ReduceOnPlateauLR]:
    return [scheduler for scheduler in runner.param_schedulers if isinstance(scheduler, ReduceOnPlateauLR)]
