"""Where a run is, for whoever reads the message hub."""

from __future__ import annotations

from typing import Any

from lockstep.hooks.hook import Hook
from lockstep.hooks.host import RunnerLike
from lockstep.registry import HOOKS


@HOOKS.register_module()
class RuntimeInfoHook(Hook):
    """Leave in the message hub where the run is, for models, metrics and visualizers that look there.

    The infos are `epoch`, `iter`, `max_epochs`, `max_iters` and `dataset_meta`; the metrics of each validation and test
    are scalars such as `val/accuracy`. Losses and times are there anyway; learning rates are in the records.
    """

    priority = "VERY_HIGH"

    def before_train(self, runner: RunnerLike) -> None:
        """Tell how long the training will be, and on what."""
        hub = runner.message_hub
        hub.update_info("max_epochs", runner.max_epochs)
        hub.update_info("max_iters", runner.max_iters)
        dataset = getattr(runner.train_dataloader, "dataset", None)
        hub.update_info("dataset_meta", getattr(dataset, "metainfo", None))
        self._tell_place(runner)

    def before_train_epoch(self, runner: RunnerLike) -> None:
        """Tell which epoch begins."""
        self._tell_place(runner)

    def before_train_iter(self, runner: RunnerLike, batch_idx: int, data_batch: Any = None) -> None:
        """Tell which iteration begins."""
        runner.message_hub.update_info("iter", runner.iter)

    def after_val_epoch(self, runner: RunnerLike, metrics: dict[str, Any] | None = None) -> None:
        """Leave the metrics of a validation."""
        _leave(runner, "val", metrics)

    def after_test_epoch(self, runner: RunnerLike, metrics: dict[str, Any] | None = None) -> None:
        """Leave the metrics of a test."""
        _leave(runner, "test", metrics)

    def _tell_place(self, runner: RunnerLike) -> None:
        runner.message_hub.update_info("epoch", runner.epoch)
        runner.message_hub.update_info("iter", runner.iter)


def _leave(runner: RunnerLike, mode: str, metrics: dict[str, Any] | None) -> None:
    for name, value in (metrics or {}).items():
        if isinstance(value, int | float):
            runner.message_hub.update_scalar(f"{mode}/{name}", value)
        else:
            runner.message_hub.update_info(f"{mode}/{name}", value)
