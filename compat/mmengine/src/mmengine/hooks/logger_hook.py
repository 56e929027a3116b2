"""`LoggerHook`: lockstep's, which also shows what a `log_processor` makes of a run's values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lockstep.hooks
from mmengine.registry import HOOKS, LOG_PROCESSORS

__all__ = ["LoggerHook"]


@HOOKS.register_module()
class LoggerHook(lockstep.hooks.LoggerHook):
    """Record the values of training every few iterations, and the metrics of each validation.

    See `lockstep.hooks.LoggerHook`. If the Runner has a `log_processor`, it is called at the same iterations: its line
    goes to the log, and those of its values that lockstep's records lack go to the visualizer, too.
    """

    _processor: Any = None

    def before_run(self, runner: Any) -> None:
        """Build the log processor."""
        super().before_run(runner)
        given = runner.args.log_processor
        if isinstance(given, Mapping):
            given = LOG_PROCESSORS.build({"type": "LogProcessor", **given})
        self._processor = given if runner.rank == 0 else None

    def after_train_iter(
        self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: dict[str, Any] | None = None
    ) -> None:
        """Store the values; show them when they are due."""
        super().after_train_iter(runner, batch_idx, data_batch, outputs)
        if self._processor is not None and (runner.iter + 1) % self.interval == 0:
            tag, line = self._processor.get_log_after_iter(runner, batch_idx, "train")
            runner.logger.info(line)
            known = {
                key.partition("/")[2] for key in runner.message_hub.log_scalars
            } | runner.optim_wrapper.get_lr().keys()
            own = {f"train/{name}": value for name, value in tag.items() if name.rpartition("/")[2] not in known}
            if own:
                runner.visualizer.add_scalars(own, step=runner.iter + 1)

    def after_val_epoch(self, runner: Any, metrics: dict[str, float] | None = None) -> None:
        """Record the metrics of a validation."""
        super().after_val_epoch(runner, metrics)
        self._show(runner, "val", metrics)

    def after_test_epoch(self, runner: Any, metrics: dict[str, float] | None = None) -> None:
        """Record the metrics of a test."""
        super().after_test_epoch(runner, metrics)
        self._show(runner, "test", metrics)

    def _show(self, runner: Any, mode: str, metrics: Mapping[str, float] | None) -> None:
        if self._processor is None:
            return
        for name, value in (metrics or {}).items():
            if isinstance(value, int | float):
                runner.message_hub.update_scalar(f"{mode}/{name}", value)
        batches = len(getattr(runner, f"{mode}_dataloader"))
        runner.logger.info(self._processor.get_log_after_epoch(runner, batches, mode)[1])
