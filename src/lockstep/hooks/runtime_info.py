"""The metrics of a run in the message hub."""

from __future__ import annotations

from typing import Any

from lockstep.registry import HOOKS
from lockstep.runner.hook import Hook
from lockstep.runner.run import Run


@HOOKS.register_module()
class RuntimeInfoHook(Hook):
    """Leave the metrics of each validation and test in the message hub, as scalars such as `val/accuracy`.

    What else MMEngine's hook of that name leaves there is there without it: the infos `epoch`, `iter`, `max_epochs`,
    `max_iters` and `dataset_meta`, losses and times. Learning rates are in the records.
    """

    priority = "VERY_HIGH"

    def after_val_epoch(self, runner: Run, metrics: dict[str, Any] | None = None) -> None:
        """Leave the metrics of a validation."""
        _leave(runner, "val", metrics)

    def after_test_epoch(self, runner: Run, metrics: dict[str, Any] | None = None) -> None:
        """Leave the metrics of a test."""
        _leave(runner, "test", metrics)


def _leave(runner: Run, mode: str, metrics: dict[str, Any] | None) -> None:
    for name, value in (metrics or {}).items():
        if isinstance(value, int | float):
            runner.message_hub.update_scalar(f"{mode}/{name}", value)
        else:
            runner.message_hub.update_info(f"{mode}/{name}", value)
