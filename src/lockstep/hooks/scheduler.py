"""Learning rates and momenta that follow their schedules."""

from __future__ import annotations

from typing import Any

from lockstep.errors import ConfigError
from lockstep.hooks.hook import Hook
from lockstep.hooks.host import RunnerLike
from lockstep.hooks.missed_validation import MissedValidation
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
        self._missed = MissedValidation()

    def before_train(self, runner: RunnerLike) -> None:
        """Refuse to wait for a plateau that nobody would see; make up for a validation that the checkpoint lacks."""
        waiting = _waiting(runner)
        if waiting and getattr(runner, "val_loop", None) is None:
            raise ConfigError(
                f"`param_scheduler` must not have a {waiting[0].title} without a validation, whose metric "
                f"{waiting[0].monitor!r} it waits for. Give `val_dataloader` and `val_evaluator`"
            )
        if waiting:
            self._missed.make_up(runner)

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
        self._missed.saw(runner)
        for scheduler in _waiting(runner):
            scheduler.observe(metrics or {})

    def before_save_checkpoint(self, runner: RunnerLike, checkpoint: dict[str, Any]) -> None:
        """Note which validation was the last."""
        checkpoint["meta"][_KEY] = self._missed.state()

    def after_load_checkpoint(self, runner: RunnerLike, checkpoint: dict[str, Any]) -> None:
        """Find out whether the metrics of a validation are missing."""
        meta = checkpoint["meta"]
        self._missed.restore(runner, meta.get(_KEY, {}), meta)


def _waiting(runner: RunnerLike) -> list[ReduceOnPlateauLR]:
    return [scheduler for scheduler in runner.param_schedulers if isinstance(scheduler, ReduceOnPlateauLR)]
