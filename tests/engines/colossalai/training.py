"""The small transformer under each of ColossalAI's plugins."""

from __future__ import annotations

from typing import Any

from torch import nn

from lockstep.strategy import Strategy, build_strategy

from ..training import PreparedTraining, train_with

PLAN = {"*.linear1": "colwise", "*.linear2": "rowwise", "head": "rowwise_rep"}
PLUGINS: dict[str, dict[str, Any]] = {
    "zero1": {"plugin": "lowlevel_zero"},
    "zero2": {"plugin": "lowlevel_zero", "stage": 2},
    "hybrid": {"plugin": "hybrid"},
    "tp2": {"plugin": "hybrid", "tensor_parallel": {"degree": 2, "plan": PLAN}},
}


# A plugin that is forgotten takes its groups off torch's list, but not all of their sockets are closed. While it is
# kept, the pool of ranks sees that groups have been made, and makes its own anew.
_kept: list[Strategy] = []


def config_of(kind: str, **options: Any) -> dict[str, Any] | str:
    """Return the config of one of ColossalAI's plugins; other names are strategies of PyTorch's."""
    return {"type": "ColossalAIStrategy", **PLUGINS[kind], **options} if kind in PLUGINS else kind


def kept(strategy: Strategy) -> Strategy:
    _kept.append(strategy)
    return strategy


def strategy_of(kind: str, **options: Any) -> Strategy:
    return kept(build_strategy(config_of(kind, **options)))


def train(kind: str, counts: int = 1, clip: bool = False, **options: Any) -> tuple[list[float], list[float]]:
    return train_with(strategy_of(kind, **options), counts, clip)


def policy_base() -> type:
    """Return a policy's class that changes nothing by itself."""
    from colossalai.shardformer.policies.base_policy import Policy

    class Unchanged(Policy):
        def config_sanity_check(self) -> None: ...

        def preprocess(self) -> nn.Module:
            return self.model

        def postprocess(self) -> nn.Module:
            return self.model

    return Unchanged


class Training(PreparedTraining):
    """A model that the strategy of a kind has prepared."""

    def __init__(self, kind: str, optim: dict[str, Any] | None = None, **options: Any) -> None:
        super().__init__(strategy_of(kind, **options), optim)
