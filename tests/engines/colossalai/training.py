"""The small transformer under each stage of ColossalAI's ZeRO."""

from __future__ import annotations

from typing import Any

from lockstep.strategy import Strategy, build_strategy

from ..training import PreparedTraining, train_with

PLUGINS: dict[str, dict[str, Any]] = {
    "zero1": {"plugin": "lowlevel_zero"},
    "zero2": {"plugin": "lowlevel_zero", "stage": 2},
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


class Training(PreparedTraining):
    """A model that the strategy of a kind has prepared."""

    def __init__(self, kind: str, optim: dict[str, Any] | None = None, **options: Any) -> None:
        super().__init__(strategy_of(kind, **options), optim)
