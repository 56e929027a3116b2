"""How a model is laid over ranks."""

from __future__ import annotations

from lockstep.strategy.base import Strategy, build_strategy
from lockstep.strategy.colossalai import ColossalAIModelWrapper, ColossalAIOptimWrapper, ColossalAIStrategy
from lockstep.strategy.ddp import DDPStrategy
from lockstep.strategy.deepspeed import DeepSpeedOptimWrapper, DeepSpeedStrategy, MMDeepSpeedEngineWrapper
from lockstep.strategy.fsdp import FSDPStrategy
from lockstep.strategy.native import NativeStrategy
from lockstep.strategy.optim_state import read_optim_state, write_optim_state
from lockstep.strategy.single import SingleDeviceStrategy

__all__ = [
    "ColossalAIModelWrapper",
    "ColossalAIOptimWrapper",
    "ColossalAIStrategy",
    "DDPStrategy",
    "DeepSpeedOptimWrapper",
    "DeepSpeedStrategy",
    "FSDPStrategy",
    "MMDeepSpeedEngineWrapper",
    "NativeStrategy",
    "SingleDeviceStrategy",
    "Strategy",
    "build_strategy",
    "read_optim_state",
    "write_optim_state",
]
