"""`LoggerHook`: lockstep's, which also shows what a `log_processor` makes of a run's values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import lockstep.hooks
from lockstep.errors import ConfigError
from mmengine.registry import HOOKS, LOG_PROCESSORS

__all__ = ["LoggerHook"]


@HOOKS.register_module()
@dataclass(eq=False, repr=False)
class LoggerHook(lockstep.hooks.LoggerHook):
    """Record the values of training every few iterations, and the metrics of each validation.

    See `lockstep.hooks.LoggerHook`. If the Runner has a `log_processor`, it is called at the same iterations: its line
    goes to the log, and those of its values that lockstep's records lack go to the visualizer, too.

    Args:
        interval_exp_name, out_suffix, keep_local: have no effect, because records stay in the run's folder.
        out_dir, file_client_args, backend_args: must be None or name the local backend, for the same reason.
    """

    interval_exp_name: int = 1000
    out_dir: None = None
    out_suffix: Sequence[str] = ()
    keep_local: bool = True
    file_client_args: None = None
    backend_args: None = None
    _processor: Any = field(default=None, init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        elsewhere = {"out_dir": self.out_dir, "file_client_args": self.file_client_args}
        check_local("records", **elsewhere, backend_args=self.backend_args)

    def before_run(self, runner: Any) -> None:
        """Build the log processor."""
        super().before_run(runner)
        given = getattr(runner, "_log_processor", None)  # a run of lockstep's own Runner has none
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
        # A RuntimeInfoHook has put them there.
        if not any(isinstance(hook, lockstep.hooks.RuntimeInfoHook) for hook in runner.hooks):
            for name, value in (metrics or {}).items():
                if isinstance(value, int | float):
                    runner.message_hub.update_scalar(f"{mode}/{name}", value)
        batches = len(getattr(runner, f"{mode}_dataloader"))
        runner.logger.info(self._processor.get_log_after_epoch(runner, batches, mode)[1])


def check_local(what: str, **given: object) -> None:
    """Refuse arguments for storage backends, unless they are None or name the local backend.

    Raises:
        ConfigError: an argument names another backend.
    """
    for name, value in given.items():
        if value is not None and value != {"backend": "local"}:
            raise ConfigError(
                f"`{name}` must be None, but is {value!r}: {what} are written through the file system. Mount the "
                "storage, and give its folder as the Runner's `work_dir`. Checkpoints may go to a URL, by `out_dir` of "
                "CheckpointHook"
            )
