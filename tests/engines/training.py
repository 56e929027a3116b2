"""What the tests of every engine do with the small transformer."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lockstep.checkpoint import load_state, save_state
from lockstep.model import train_step
from lockstep.strategy import Strategy

from ..strategy.transformer import STEPS, mean_over_ranks, optim_config, own_batches, seeded, train_by_strategy


def train_with(strategy: Strategy, counts: int, clip: bool) -> tuple[list[float], list[float]]:
    """Return the losses, as means over the ranks, and the norms of the gradients."""
    losses, norms = train_by_strategy(strategy, counts, clip)
    return mean_over_ranks(losses), norms


class PreparedTraining:
    """A model that a strategy has prepared."""

    def __init__(self, strategy: Strategy, optim: dict[str, Any] | None = None) -> None:
        self.strategy = strategy
        self.model, self.optim_wrapper = strategy.prepare(seeded(), optim or optim_config())
        self._batches = own_batches(shard=strategy.data_shard)

    def run(self, start: int = 0, stop: int = STEPS) -> list[float]:
        """Return the losses of these steps, as means over the ranks."""
        step = getattr(self.model, "train_step", partial(train_step, self.model))
        batches = self._batches[start:stop]
        return mean_over_ranks([step(batch, self.optim_wrapper)["loss"].item() for batch in batches])

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
    if isinstance(state, list):
        return [whole(value) for value in state]
    if isinstance(state, DTensor):
        return state.full_tensor()
    return state.detach().clone() if isinstance(state, Tensor) else state


def assert_equal(left: Any, right: Any, path: str = "state") -> None:
    if isinstance(left, dict):
        assert left.keys() == right.keys(), path
        for key in left:
            assert_equal(left[key], right[key], f"{path}.{key}")
    elif isinstance(left, list | tuple):
        assert len(left) == len(right), path
        for index, (a, b) in enumerate(zip(left, right, strict=True)):
            assert_equal(a, b, f"{path}.{index}")
    elif isinstance(left, Tensor):
        assert torch.equal(left, right), path
    else:
        assert left == right, path
