"""A hook that puts the metrics and learning rates of a run into the message hub."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lockstep.registry import HOOKS
from lockstep.runner.hook import Hook
from lockstep.runner.run import Run, TrainRun


@HOOKS.register_module()
class RuntimeInfoHook(Hook):
    """Put metrics, as scalars such as `val/accuracy`, and learning rates, as `train/lr`, into the message hub.

    The info `loop_stage` is `"train"`, `"val"` or `"test"` within the loop of this name.

    A rate is that of the iteration. One that is a tensor on a device is left out, because to read it would wait for the
    device in each iteration, and so is one that the optimizer sets itself. The other values that MMEngine's hook of
    this name provides are there without this hook: the infos `epoch`, `iter`, `max_epochs`, `max_iters` and
    `dataset_meta`, losses and times.
    """

    priority = "VERY_HIGH"
    _stage_around: str | None = None  # in which a validation or test was begun

    def before_train(self, runner: TrainRun) -> None:
        """Tell that it is the training."""
        _tell_stage(runner, "train")

    def after_train(self, runner: TrainRun) -> None:
        """Tell that it is none any more."""
        _tell_stage(runner, None)

    def before_val(self, runner: Run) -> None:
        """Tell that it is a validation."""
        self._stage_around = runner.message_hub.get_info("loop_stage")
        _tell_stage(runner, "val")

    def after_val(self, runner: Run) -> None:
        """Tell that it is the training again, if there is one around it."""
        _tell_stage(runner, self._stage_around)

    def before_test(self, runner: Run) -> None:
        """Tell that it is a test."""
        self._stage_around = runner.message_hub.get_info("loop_stage")
        _tell_stage(runner, "test")

    def after_test(self, runner: Run) -> None:
        """Tell that it is the training again, if there is one around it."""
        _tell_stage(runner, self._stage_around)

    def before_train_iter(self, runner: TrainRun, batch_idx: int, data_batch: Any = None) -> None:
        """Put the learning rates of the iteration into the message hub."""
        rates = [group.get("lr") for group in runner.optim_wrapper.param_groups]
        if any(rate is None or (isinstance(rate, Tensor) and not rate.is_cpu) for rate in rates):
            return
        for name, own in runner.optim_wrapper.get_lr().items():
            runner.message_hub.update_scalar(f"train/{name}", own[0])

    def after_val_epoch(self, runner: Run, metrics: dict[str, Any] | None = None) -> None:
        """Put the metrics of a validation into the message hub."""
        _put_metrics(runner, "val", metrics)

    def after_test_epoch(self, runner: Run, metrics: dict[str, Any] | None = None) -> None:
        """Put the metrics of a test into the message hub."""
        _put_metrics(runner, "test", metrics)


def _tell_stage(runner: Run, stage: str | None) -> None:
    if stage is None:
        runner.message_hub.pop_info("loop_stage")
    else:
        runner.message_hub.update_info("loop_stage", stage)


def _put_metrics(runner: Run, mode: str, metrics: dict[str, Any] | None) -> None:
    for name, value in (metrics or {}).items():
        if isinstance(value, int | float):
            runner.message_hub.update_scalar(f"{mode}/{name}", value)
        else:
            runner.message_hub.update_info(f"{mode}/{name}", value)
