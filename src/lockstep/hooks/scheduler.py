"""Learning rates that follow their schedules."""

from __future__ import annotations

from typing import Any

from lockstep.hooks.hook import Hook
from lockstep.hooks.host import RunnerLike
from lockstep.registry import HOOKS


@HOOKS.register_module()
class ParamSchedulerHook(Hook):
    """Step the schedulers that count iterations after each, the others after each epoch."""

    priority = "LOW"

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
