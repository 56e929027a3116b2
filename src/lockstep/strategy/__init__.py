"""How a model is laid over ranks.

A strategy is imported when it is asked for: what FSDP and the engines stand on takes longer to import than all else.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lockstep.strategy.base import Strategy, build_strategy

if TYPE_CHECKING:
    from lockstep.strategy.colossalai import ColossalAIModelWrapper, ColossalAIOptimWrapper, ColossalAIStrategy
    from lockstep.strategy.ddp import DDPStrategy, SingleDeviceStrategy
    from lockstep.strategy.deepspeed import DeepSpeedOptimWrapper, DeepSpeedStrategy, MMDeepSpeedEngineWrapper
    from lockstep.strategy.fsdp import FSDPStrategy
    from lockstep.strategy.native import NativeStrategy
    from lockstep.strategy.optim_state import read_optim_state, write_optim_state

_HOMES = {
    "ColossalAIModelWrapper": "lockstep.strategy.colossalai",
    "ColossalAIOptimWrapper": "lockstep.strategy.colossalai",
    "ColossalAIStrategy": "lockstep.strategy.colossalai",
    "DDPStrategy": "lockstep.strategy.ddp",
    "DeepSpeedOptimWrapper": "lockstep.strategy.deepspeed",
    "DeepSpeedStrategy": "lockstep.strategy.deepspeed",
    "FSDPStrategy": "lockstep.strategy.fsdp",
    "MMDeepSpeedEngineWrapper": "lockstep.strategy.deepspeed",
    "NativeStrategy": "lockstep.strategy.native",
    "SingleDeviceStrategy": "lockstep.strategy.ddp",
    "read_optim_state": "lockstep.strategy.optim_state",
    "write_optim_state": "lockstep.strategy.optim_state",
}

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


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
