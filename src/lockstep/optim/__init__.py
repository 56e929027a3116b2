"""One optimizer update: accumulation, clipping, and the schedules of learning rates."""

from __future__ import annotations

from lockstep.optim.build import build_optim_wrapper
from lockstep.optim.scheduler import ParamScheduler, build_param_schedulers
from lockstep.optim.wrapper import OptimWrapper
from lockstep.optim.wrapper_dict import OptimWrapperDict

__all__ = ["OptimWrapper", "OptimWrapperDict", "ParamScheduler", "build_optim_wrapper", "build_param_schedulers"]
