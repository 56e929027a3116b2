"""Optimizers, and what wraps them: lockstep's, under the same names."""

from __future__ import annotations

from torch.distributed.optim import ZeroRedundancyOptimizer

from lockstep.optim import (
    AmpOptimWrapper,
    OptimWrapper,
    OptimWrapperDict,
    build_optim_wrapper,
)
from mmengine.optim.optimizer.apex_optimizer_wrapper import ApexOptimWrapper
from mmengine.optim.optimizer.default_constructor import DefaultOptimWrapperConstructor
from mmengine.registry import OPTIM_WRAPPER_CONSTRUCTORS, OPTIMIZERS

OPTIMIZERS.register_module(module=ZeroRedundancyOptimizer)

__all__ = [
    "OPTIMIZERS",
    "OPTIM_WRAPPER_CONSTRUCTORS",
    "AmpOptimWrapper",
    "ApexOptimWrapper",
    "DefaultOptimWrapperConstructor",
    "OptimWrapper",
    "OptimWrapperDict",
    "ZeroRedundancyOptimizer",
    "build_optim_wrapper",
]
