"""The schedules of learning rates, for momentum; Adam's first beta counts as one."""

from __future__ import annotations

from dataclasses import dataclass, field

from lockstep.optim.schedules import (
    ConstantLR,
    CosineAnnealingLR,
    CosineRestartLR,
    ExponentialLR,
    LinearLR,
    MultiStepLR,
    PolyLR,
    StepLR,
)
from lockstep.registry import PARAM_SCHEDULERS


@PARAM_SCHEDULERS.register_module()
@dataclass(eq=False, repr=False)
class ConstantMomentum(ConstantLR):
    """`ConstantLR` for momentum."""

    param_name: str = field(default="momentum", kw_only=True)


@PARAM_SCHEDULERS.register_module()
@dataclass(eq=False, repr=False)
class CosineAnnealingMomentum(CosineAnnealingLR):
    """`CosineAnnealingLR` for momentum."""

    param_name: str = field(default="momentum", kw_only=True)


@PARAM_SCHEDULERS.register_module()
@dataclass(eq=False, repr=False)
class CosineRestartMomentum(CosineRestartLR):
    """`CosineRestartLR` for momentum."""

    param_name: str = field(default="momentum", kw_only=True)


@PARAM_SCHEDULERS.register_module()
@dataclass(eq=False, repr=False)
class ExponentialMomentum(ExponentialLR):
    """`ExponentialLR` for momentum."""

    param_name: str = field(default="momentum", kw_only=True)


@PARAM_SCHEDULERS.register_module()
@dataclass(eq=False, repr=False)
class LinearMomentum(LinearLR):
    """`LinearLR` for momentum."""

    param_name: str = field(default="momentum", kw_only=True)


@PARAM_SCHEDULERS.register_module()
@dataclass(eq=False, repr=False)
class MultiStepMomentum(MultiStepLR):
    """`MultiStepLR` for momentum."""

    param_name: str = field(default="momentum", kw_only=True)


@PARAM_SCHEDULERS.register_module()
@dataclass(eq=False, repr=False)
class PolyMomentum(PolyLR):
    """`PolyLR` for momentum."""

    param_name: str = field(default="momentum", kw_only=True)


@PARAM_SCHEDULERS.register_module()
@dataclass(eq=False, repr=False)
class StepMomentum(StepLR):
    """`StepLR` for momentum."""

    param_name: str = field(default="momentum", kw_only=True)
