"""Strategies: how a model is distributed over ranks.

A strategy is imported when it is first used: the dependencies of FSDP and of the engines take longer to import than
everything else.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lockstep.strategy.base import Strategy, build_strategy

if TYPE_CHECKING:
    from lockstep.strategy.colossalai import ColossalAIModelWrapper, ColossalAIOptimWrapper, ColossalAIStrategy
    from lockstep.strategy.deepspeed import DeepSpeedOptimWrapper, DeepSpeedStrategy, MMDeepSpeedEngineWrapper
    from lockstep.strategy.fsdp import FSDPStrategy
    from lockstep.strategy.native import DDPStrategy, NativeStrategy, SingleDeviceStrategy
    from lockstep.strategy.optim_state import read_optim_state, write_optim_state

_HOMES = {
    "colossalai": {"ColossalAIModelWrapper", "ColossalAIOptimWrapper", "ColossalAIStrategy"},
    "deepspeed": {"DeepSpeedOptimWrapper", "DeepSpeedStrategy", "MMDeepSpeedEngineWrapper"},
    "fsdp": {"FSDPStrategy"},
    "native": {"DDPStrategy", "NativeStrategy", "SingleDeviceStrategy"},
    "optim_state": {"read_optim_state", "write_optim_state"},
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
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{home}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
