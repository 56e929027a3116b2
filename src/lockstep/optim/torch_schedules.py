"""`TorchScheduler`: a schedule of torch, or a user's subclass of one, within a window."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from torch.optim import Optimizer, lr_scheduler
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from lockstep.errors import ConfigError
from lockstep.optim.scheduler import ParamScheduler, length_argument, window_length
from lockstep.registry import PARAM_SCHEDULERS
from lockstep.registry.signatures import check_names

# Torch's schedules whose names lockstep does not use.
for _name in ("CosineAnnealingWarmRestarts", "CyclicLR", "PolynomialLR"):
    PARAM_SCHEDULERS.register_module(module=getattr(lr_scheduler, _name))


class TorchScheduler(ParamScheduler):
    """A torch schedule that counts epochs or batches, from `begin` up to `end`.

    Args:
        schedule: a subclass of `torch.optim.lr_scheduler.LRScheduler`. It is created when `begin` is reached, from the
            learning rate that the optimizer has then.
        optimizer: the optimizer whose learning rates are set.
        by_epoch: count epochs; otherwise batches.
        begin: the count at which the schedule starts.
        end: the count from which the schedule no longer changes the learning rates; None for never.
        last_step: as for `ParamScheduler`.
        verbose: as for `ParamScheduler`.
        **kwargs: arguments of `schedule`, in epochs or batches like `by_epoch`. A length defaults to the window's.
    """

    def __init__(
        self,
        schedule: type[LRScheduler],
        optimizer: Optimizer,
        *,
        by_epoch: bool = True,
        begin: int = 0,
        end: int | None = None,
        last_step: int = -1,
        verbose: bool = False,
        **kwargs: Any,
    ) -> None:
        if issubclass(schedule, ReduceLROnPlateau):
            raise ConfigError(
                f"{schedule.__name__} must be given as lockstep's own, which sees the metrics of the validation: "
                "dict(type='ReduceOnPlateauLR', monitor=...)"
            )
        name = length_argument(schedule)
        if name is not None and kwargs.get(name) is None and end is not None:
            kwargs[name] = window_length(name, begin, end)
        # Now: a schedule that begins late would otherwise raise in the middle of a run.
        check_names(schedule, ["optimizer", *kwargs], PARAM_SCHEDULERS.name, ("by_epoch", "begin", "end"))
        self._schedule = schedule
        self._kwargs = kwargs
        self._inner: LRScheduler | None = None
        super().__init__(optimizer, by_epoch=by_epoch, begin=begin, end=end, last_step=last_step, verbose=verbose)

    def advance(self, t: int) -> None:
        """Let torch's schedule set the learning rates."""
        if self._inner is None:
            for group in self.optimizer.param_groups:
                group.setdefault("initial_lr", group["lr"])
            self._inner = self._schedule(self.optimizer, **self._kwargs)
            return
        step_quietly(self._inner)

    def restart(self) -> None:
        """Begin anew, from the values that the groups have now."""
        self._inner = None
        super().restart()

    @property
    def title(self) -> str:
        """The schedule's name in errors and logs."""
        return self._schedule.__name__

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the schedule, in plain numbers, strings and lists."""
        inner = {} if self._inner is None else self._inner.state_dict()
        return {**super().state_dict(), "schedule": {key: value for key, value in inner.items() if _is_plain(value)}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of a scheduler with the same arguments."""
        super().load_state_dict(state)
        if state["schedule"]:
            if self._inner is None:
                self.advance(0)
            assert self._inner is not None
            self._inner.load_state_dict(dict(state["schedule"]))

    def _shown(self) -> list[str]:
        return [f"{name}={value!r}" for name, value in self._kwargs.items()]


def step_quietly(schedule: LRScheduler) -> None:
    """Step a schedule of torch, which warns if no optimizer step came first: normal when gradients are accumulated."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r".*lr_scheduler\.step\(\)")
        schedule.step()


def _is_plain(value: Any) -> bool:
    if isinstance(value, list):
        return all(_is_plain(item) for item in value)
    return isinstance(value, bool | int | float | str)
