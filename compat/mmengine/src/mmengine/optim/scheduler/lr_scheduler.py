"""Schedules of learning rates."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, TypeVar

import lockstep.optim
from mmengine.optim.scheduler import param_scheduler as schedules
from mmengine.registry import PARAM_SCHEDULERS

__all__ = [
    "ConstantLR",
    "CosineAnnealingLR",
    "CosineRestartLR",
    "ExponentialLR",
    "LRSchedulerMixin",
    "LinearLR",
    "MultiStepLR",
    "OneCycleLR",
    "PolyLR",
    "ReduceOnPlateauLR",
    "StepLR",
]

_Class = TypeVar("_Class", bound=type)


class LRSchedulerMixin:
    """Put before a schedule among the bases of a class, it makes the schedule one of learning rates."""

    def __init__(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(optimizer, "lr", *args, **kwargs)  # type: ignore[call-arg]


def with_signature(cls: _Class) -> _Class:
    """Register a class, and give its constructor the arguments of the schedule, without the name of the value."""
    inner = inspect.signature(cls.__mro__[2].__init__)  # type: ignore[misc]
    outer = cls.__mro__[1].__init__  # type: ignore[misc]

    @functools.wraps(outer)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        outer(self, *args, **kwargs)

    names = [one for name, one in inner.parameters.items() if name != "param_name"]
    __init__.__signature__ = inner.replace(parameters=names)  # type: ignore[attr-defined]
    cls.__init__ = __init__  # type: ignore[misc]
    return PARAM_SCHEDULERS.register_module(module=cls)


class PlateauMixin:
    """Put before a schedule that follows a metric, it lets `step` take the metrics, as MMEngine's does.

    Its state has MMEngine's form, except that without a best value that is None; a state of lockstep is read, too.
    """

    needs_end: ClassVar[bool] = True
    count_key: ClassVar[str] = "_global_step"
    _PROGRESS: ClassVar[Mapping[str, str]] = {
        "_global_step": "count",
        "best": "best",
        "num_bad_epochs": "bad",
        "cooldown_counter": "cooling",
    }
    _ARGUMENTS: ClassVar[Sequence[str]] = (
        "begin", "end", "by_epoch", "param_name", "monitor", "rule", "factor", "patience", "threshold",
        "threshold_rule", "cooldown", "eps",
    )  # fmt: skip

    def step(self, metrics: Mapping[str, Any] | None = None) -> None:
        """Count one epoch or batch; with metrics, compare them with the best so far, and perhaps lower the value.

        A Runner passes the metrics of each validation to `observe` itself.
        """
        super().step()  # type: ignore[misc]
        if metrics is not None:
            self.observe(metrics)  # type: ignore[attr-defined]

    def state_dict(self) -> dict[str, Any]:
        """Return the counts, the best value, and the arguments."""
        own: Any = super()
        progress = own.state_dict()
        arguments = {name: getattr(self, name) for name in self._ARGUMENTS}
        arguments |= {"end": arguments["end"] or schedules.INF, "min_values": own._by_group("min_value")}
        return {**{name: progress[key] for name, key in self._PROGRESS.items()}, **arguments}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned, here or of MMEngine's or lockstep's schedule."""
        self.load_progress(state)
        vars(self).update({name: state[name] for name in self._ARGUMENTS if name in state})
        if "min_values" in state:
            vars(self)["min_value"] = list(state["min_values"])

    def load_progress(self, state: Mapping[str, Any]) -> None:
        """Restore the counts and the best value."""
        progress = {key: state[name if name in state else key] for name, key in self._PROGRESS.items()}
        if isinstance(progress["best"], float) and math.isinf(progress["best"]):
            progress["best"] = None
        own: Any = super()
        own.load_state_dict(progress)


@PARAM_SCHEDULERS.register_module()
class ReduceOnPlateauLR(PlateauMixin, lockstep.optim.ReduceOnPlateauLR):
    """Lower learning rates when a metric has stopped improving; see `lockstep.optim.ReduceOnPlateauLR`."""


@with_signature
class ConstantLR(LRSchedulerMixin, schedules.ConstantParamScheduler):
    """`ConstantParamScheduler` for learning rates."""


@with_signature
class CosineAnnealingLR(LRSchedulerMixin, schedules.CosineAnnealingParamScheduler):
    """`CosineAnnealingParamScheduler` for learning rates."""


@with_signature
class ExponentialLR(LRSchedulerMixin, schedules.ExponentialParamScheduler):
    """`ExponentialParamScheduler` for learning rates."""


@with_signature
class LinearLR(LRSchedulerMixin, schedules.LinearParamScheduler):
    """`LinearParamScheduler` for learning rates."""


@with_signature
class MultiStepLR(LRSchedulerMixin, schedules.MultiStepParamScheduler):
    """`MultiStepParamScheduler` for learning rates."""


@with_signature
class StepLR(LRSchedulerMixin, schedules.StepParamScheduler):
    """`StepParamScheduler` for learning rates."""


@with_signature
class PolyLR(LRSchedulerMixin, schedules.PolyParamScheduler):
    """`PolyParamScheduler` for learning rates."""


@with_signature
class OneCycleLR(LRSchedulerMixin, schedules.OneCycleParamScheduler):
    """`OneCycleParamScheduler` for learning rates."""


@with_signature
class CosineRestartLR(LRSchedulerMixin, schedules.CosineRestartParamScheduler):
    """`CosineRestartParamScheduler` for learning rates."""
