"""Schedules of momenta; with Adam, of the first beta."""

from __future__ import annotations

from typing import Any

import lockstep.optim
from mmengine.optim.scheduler import param_scheduler as schedules
from mmengine.optim.scheduler.lr_scheduler import PlateauMixin, with_signature
from mmengine.registry import PARAM_SCHEDULERS

__all__ = [
    "ConstantMomentum",
    "CosineAnnealingMomentum",
    "CosineRestartMomentum",
    "ExponentialMomentum",
    "LinearMomentum",
    "MomentumSchedulerMixin",
    "MultiStepMomentum",
    "PolyMomentum",
    "ReduceOnPlateauMomentum",
    "StepMomentum",
]


class MomentumSchedulerMixin:
    """Put before a schedule among the bases of a class, it makes the schedule one of momenta.

    The groups of an optimizer that has betas in place of a momentum get the first beta as their `momentum`, and it
    follows each change.
    """

    optimizer: Any

    def __init__(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        inner = getattr(optimizer, "optimizer", optimizer)
        if "momentum" not in inner.defaults and "betas" not in inner.defaults:
            raise ValueError(f"the optimizer must have a `momentum` or `betas`, but {type(inner).__name__} has neither")
        super().__init__(optimizer, "momentum", *args, **kwargs)  # type: ignore[call-arg]

    def _begin(self, last_step: int) -> None:
        if "momentum" not in self.optimizer.defaults:
            for group in self.optimizer.param_groups:
                group["momentum"] = group["betas"][0]
        super()._begin(last_step)  # type: ignore[misc]

    def step(self) -> None:
        """Count one epoch or batch, and set the values for the next one."""
        super().step()  # type: ignore[misc]
        if "momentum" not in self.optimizer.defaults:
            for group in self.optimizer.param_groups:
                group["betas"] = (group["momentum"], *group["betas"][1:])


@PARAM_SCHEDULERS.register_module()
class ReduceOnPlateauMomentum(PlateauMixin, lockstep.optim.ReduceOnPlateauMomentum):  # type: ignore[misc, valid-type]
    """Lower momenta when a metric has stopped improving; see `lockstep.optim.ReduceOnPlateauMomentum`."""


@with_signature
class ConstantMomentum(MomentumSchedulerMixin, schedules.ConstantParamScheduler):
    """`ConstantParamScheduler` for momenta."""


@with_signature
class CosineAnnealingMomentum(MomentumSchedulerMixin, schedules.CosineAnnealingParamScheduler):
    """`CosineAnnealingParamScheduler` for momenta."""


@with_signature
class ExponentialMomentum(MomentumSchedulerMixin, schedules.ExponentialParamScheduler):
    """`ExponentialParamScheduler` for momenta."""


@with_signature
class LinearMomentum(MomentumSchedulerMixin, schedules.LinearParamScheduler):
    """`LinearParamScheduler` for momenta."""


@with_signature
class MultiStepMomentum(MomentumSchedulerMixin, schedules.MultiStepParamScheduler):
    """`MultiStepParamScheduler` for momenta."""


@with_signature
class StepMomentum(MomentumSchedulerMixin, schedules.StepParamScheduler):
    """`StepParamScheduler` for momenta."""


@with_signature
class PolyMomentum(MomentumSchedulerMixin, schedules.PolyParamScheduler):
    """`PolyParamScheduler` for momenta."""


@with_signature
class CosineRestartMomentum(MomentumSchedulerMixin, schedules.CosineRestartParamScheduler):
    """`CosineRestartParamScheduler` for momenta."""
