"""A hook that steps the schedulers of learning rates and momenta."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from lockstep.errors import ConfigError
from lockstep.hooks.arguments import check_metrics
from lockstep.optim import OptimWrapper, OptimWrapperDict, ReduceOnPlateauLR
from lockstep.registry import HOOKS
from lockstep.runner.hook import Hook
from lockstep.runner.run import Run, TrainRun

_KEY = "param_scheduler_hook"
_ZEROS = 3


@HOOKS.register_module()
class ParamSchedulerHook(Hook):
    """Step iteration-based schedulers after each iteration, and the others after each epoch.

    Iterations whose update float16 has skipped do not count, as torch advises: a schedule follows the updates that were
    made. A `ReduceOnPlateauLR` also receives the metrics of each validation.

    **Source**: torch's documentation of automatic mixed precision, on `GradScaler` and schedulers (2.13).
    """

    priority = "LOW"

    # By optimizer: updates that have been skipped, and iterations that are not to count. Neither `__init__` nor
    # `before_train` is relied upon: MMEngine's hook has none, so subclasses with their own call none.
    _skipped: Sequence[int] = ()
    _held: Sequence[float] = ()
    _zeros: int | None = None  # iterations in a row whose rates are all 0; None before one was not, as in a warm-up

    def before_train(self, runner: TrainRun) -> None:
        """Raise an error if a scheduler waits for a plateau of what no validation computes."""
        waiting = _waiting(runner)
        if waiting and runner.val_loop is None:
            raise ConfigError(
                f"`param_scheduler` must not have a {waiting[0].title} without a validation, whose metric "
                f"{waiting[0].monitor!r} it waits for. Give `val_dataloader` and `val_evaluator`"
            )
        check_metrics("monitor", [one.monitor for one in waiting], runner)
        self._skipped = [wrapper.skipped_updates for wrapper in _wrappers(runner)]

    def after_train_iter(self, runner: TrainRun, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        """Step the schedulers that count iterations."""
        by_iteration = [scheduler for scheduler in runner.param_schedulers if not scheduler.by_epoch]
        idle = self._idle(runner) if by_iteration else set()  # asking waits for the update before on an accelerator
        for scheduler in by_iteration:
            if id(scheduler.optimizer) not in idle:
                scheduler.step()
        if by_iteration:
            self._warn_of_zero(runner)

    def _warn_of_zero(self, runner: TrainRun) -> None:
        """Warn if the schedules have ended before the training: nothing is trained at a rate of 0."""
        rates = [group["lr"] for group in runner.optim_wrapper.param_groups]
        if any(isinstance(rate, Tensor) or rate != 0 for rate in rates):  # a tensor may be on a device
            self._zeros = 0
        elif self._zeros is not None:
            self._zeros += 1
        if self._zeros == _ZEROS and (left := runner.max_iters - runner.iter - 1) > 0:
            runner.logger.warning(
                "the schedules have set all learning rates to 0, %d iterations before the last of %d: nothing is "
                "trained at that rate. A schedule by iterations counts batches, of which `accumulative_counts` make an "
                "update",
                left + _ZEROS - 1, runner.max_iters,
            )  # fmt: skip

    def before_save_checkpoint(self, runner: TrainRun, checkpoint: dict[str, Any]) -> None:
        """Add the iterations that are not to count."""
        checkpoint["meta"][_KEY] = {"held": list(self._held)}

    def after_load_checkpoint(self, runner: TrainRun, checkpoint: dict[str, Any]) -> None:
        """Restore them."""
        self._held = list(checkpoint["meta"].get(_KEY, {"held": []})["held"])

    def _idle(self, runner: TrainRun) -> set[int]:
        """Return the ids of optimizers for which this iteration does not count."""
        wrappers = _wrappers(runner)
        before, held = _one_for_each(wrappers, self._skipped), _one_for_each(wrappers, self._held)
        skipped = [wrapper.skipped_updates for wrapper in wrappers]
        idle = set()
        for index, wrapper in enumerate(wrappers):
            held[index] += (skipped[index] - before[index]) * wrapper.batches_per_update
            if held[index] >= 1:
                held[index] -= 1
                idle.add(id(wrapper.optimizer))
        self._skipped, self._held = skipped, held
        return idle

    def after_train_epoch(self, runner: TrainRun) -> None:
        """Step the schedulers that count epochs."""
        for scheduler in runner.param_schedulers:
            if scheduler.by_epoch:
                scheduler.step()

    def after_val_epoch(self, runner: Run, metrics: dict[str, Any] | None = None) -> None:
        """Pass the metrics to the schedulers that wait for a plateau."""
        for scheduler in _waiting(runner):
            scheduler.observe(metrics or {})


def _wrappers(runner: TrainRun) -> list[OptimWrapper]:
    wrapper = runner.optim_wrapper
    return list(wrapper.values()) if isinstance(wrapper, OptimWrapperDict) else [wrapper]


def _one_for_each(wrappers: Sequence[OptimWrapper], counts: Sequence[float]) -> list[float]:
    return list(counts) if len(counts) == len(wrappers) else [0.0] * len(wrappers)


def _waiting(runner: Run) -> list[ReduceOnPlateauLR]:
    return [scheduler for scheduler in runner.param_schedulers if isinstance(scheduler, ReduceOnPlateauLR)]
