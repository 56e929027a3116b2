"""The small transformer under each of ColossalAI's plugins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lockstep.checkpoint import load_state, save_state
from lockstep.strategy import Strategy, build_strategy

from ...strategy.transformer import STEPS, mean_over_ranks, optim_config, own_batches, seeded, train_by_strategy

PLAN = {"*.linear1": "colwise", "*.linear2": "rowwise", "head": "rowwise_rep"}
PLUGINS: dict[str, dict[str, Any]] = {
    "ddp": {"plugin": "ddp"},
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


def strategy_of(kind: str, **options: Any) -> Strategy:
    _kept.append(build_strategy(config_of(kind, **options)))
    return _kept[-1]


def train(kind: str, counts: int = 1, clip: bool = False, **options: Any) -> tuple[list[float], list[float]]:
    """Return the losses, as means over the ranks, and the norms of the gradients."""
    losses, norms = train_by_strategy(strategy_of(kind, **options), counts, clip)
    return mean_over_ranks(losses), norms


class Training:
    """A model that has been prepared."""

    def __init__(self, kind: str, optim: dict[str, Any] | None = None, **options: Any) -> None:
        self.strategy = strategy_of(kind, **options)
        self.model, self.optim_wrapper = self.strategy.prepare(seeded(), optim or optim_config())
        self._batches = own_batches(share=self.strategy.data_share)

    def run(self, start: int = 0, stop: int = STEPS) -> list[float]:
        """Return the losses of these steps, as means over the ranks."""
        steps = self._batches[start:stop]
        return mean_over_ranks([self.model.train_step(batch, self.optim_wrapper)["loss"].item() for batch in steps])

    def state(self) -> dict[str, Any]:
        return {"model": self.strategy.model_state(), "optimizer": self.strategy.optim_state()}

    def save(self, path: Path) -> None:
        save_state(path, self.state(), {})

    def load(self, path: Path) -> None:
        state = load_state(path, self.state())
        self.strategy.load_state(state["model"], state["optimizer"])


def whole(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: whole(value) for key, value in state.items()}
    if isinstance(state, Tensor):
        return (state.full_tensor() if isinstance(state, DTensor) else state.detach()).clone()
    return state


def assert_equal(left: Any, right: Any) -> None:
    if isinstance(left, dict):
        assert left.keys() == right.keys()
        for key in left:
            assert_equal(left[key], right[key])
    elif isinstance(left, Tensor):
        assert torch.equal(left, right)
    else:
        assert left == right
