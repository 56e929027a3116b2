"""Optimizer updates: accumulation, clipping, mixed precision and learning rate schedules."""

from __future__ import annotations

from lockstep.optim.amp import AmpOptimWrapper
from lockstep.optim.build_schedulers import TorchScheduler, build_param_schedulers
from lockstep.optim.constructor import DefaultOptimWrapperConstructor, build_optim_wrapper
from lockstep.optim.scheduler import FormulaScheduler, ParamScheduler
from lockstep.optim.schedules import (
    ConstantLR,
    ConstantMomentum,
    CosineAnnealingLR,
    CosineAnnealingMomentum,
    CosineRestartLR,
    CosineRestartMomentum,
    ExponentialLR,
    ExponentialMomentum,
    LinearLR,
    LinearMomentum,
    MultiStepLR,
    MultiStepMomentum,
    OneCycleLR,
    PolyLR,
    PolyMomentum,
    ReduceOnPlateauLR,
    ReduceOnPlateauMomentum,
    StepLR,
    StepMomentum,
)
from lockstep.optim.several import JoinedOptimizer, OptimWrapperDict
from lockstep.optim.wrapper import OptimWrapper
from lockstep.registry import OPTIM_WRAPPER_CONSTRUCTORS, OPTIMIZERS

__all__ = [
    "OPTIMIZERS",
    "OPTIM_WRAPPER_CONSTRUCTORS",
    "AmpOptimWrapper",
    "ConstantLR",
    "ConstantMomentum",
    "CosineAnnealingLR",
    "CosineAnnealingMomentum",
    "CosineRestartLR",
    "CosineRestartMomentum",
    "DefaultOptimWrapperConstructor",
    "ExponentialLR",
    "ExponentialMomentum",
    "FormulaScheduler",
    "JoinedOptimizer",
    "LinearLR",
    "LinearMomentum",
    "MultiStepLR",
    "MultiStepMomentum",
    "OneCycleLR",
    "OptimWrapper",
    "OptimWrapperDict",
    "ParamScheduler",
    "PolyLR",
    "PolyMomentum",
    "ReduceOnPlateauLR",
    "ReduceOnPlateauMomentum",
    "StepLR",
    "StepMomentum",
    "TorchScheduler",
    "build_optim_wrapper",
    "build_param_schedulers",
]
