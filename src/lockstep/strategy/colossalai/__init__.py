"""The ColossalAI strategy: options of its plugin (`plugin`), the booster (`engine`), canonical states (`state`)."""

from __future__ import annotations

from lockstep.strategy.colossalai.strategy import ColossalAIStrategy
from lockstep.strategy.colossalai.wrappers import ColossalAIModelWrapper, ColossalAIOptimWrapper

__all__ = ["ColossalAIModelWrapper", "ColossalAIOptimWrapper", "ColossalAIStrategy"]
