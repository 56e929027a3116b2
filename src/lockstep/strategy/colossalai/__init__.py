"""The ColossalAI strategy: plugins (`plugin`), the booster (`engine`), pipelines, canonical states (`state`)."""

from __future__ import annotations

from lockstep.strategy.colossalai.model import ColossalAIModelWrapper
from lockstep.strategy.colossalai.optim import ColossalAIOptimWrapper
from lockstep.strategy.colossalai.strategy import ColossalAIStrategy

__all__ = ["ColossalAIModelWrapper", "ColossalAIOptimWrapper", "ColossalAIStrategy"]
