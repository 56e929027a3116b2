"""The DeepSpeed strategy: its config (`config`), the engine (`engine`, `optim`), canonical states (`state`)."""

from __future__ import annotations

from lockstep.strategy.deepspeed.engine import MMDeepSpeedEngineWrapper
from lockstep.strategy.deepspeed.optim import DeepSpeedOptimWrapper
from lockstep.strategy.deepspeed.strategy import DeepSpeedStrategy

__all__ = ["DeepSpeedOptimWrapper", "DeepSpeedStrategy", "MMDeepSpeedEngineWrapper"]
