"""A hook that puts the metrics of a run into the message hub."""

from __future__ import annotations

from typing import Any

from lockstep.registry import HOOKS
from lockstep.runner.hook import Hook
from lockstep.runner.run import Run


@HOOKS.register_module()
class RuntimeInfoHook(Hook):
    """Put the metrics of each validation and test into the message hub, as scalars such as `val/accuracy`.

    The other values that MMEngine's hook of this name provides are there without this hook: the infos `epoch`, `iter`,
    `max_epochs`, `max_iters` and `dataset_meta`, losses and times. Learning rates are in the records.
    """

    priority = "VERY_HIGH"

    def after_val_epoch(self, runner: Run, metrics: dict[str, Any] | None = None) -> None:
        """Put the metrics of a validation into the message hub."""
        _leave(runner, "val", metrics)

    def after_test_epoch(self, runner: Run, metrics: dict[str, Any] | None = None) -> None:
        """Put the metrics of a test into the message hub."""
        _leave(runner, "test", metrics)


def _leave(runner: Run, mode: str, metrics: dict[str, Any] | None) -> None:
    for name, value in (metrics or {}).items():
        if isinstance(value, int | float):
            runner.message_hub.update_scalar(f"{mode}/{name}", value)
        else:
            runner.message_hub.update_info(f"{mode}/{name}", value)
