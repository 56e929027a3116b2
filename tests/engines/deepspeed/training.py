"""The small transformer under each stage of ZeRO."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lockstep.checkpoint import load_state, save_state
from lockstep.model import train_step
from lockstep.strategy import Strategy, build_strategy

from ...strategy.transformer import STEPS, mean_over_ranks, optim_config, own_batches, seeded, train_by_strategy

STAGES = (0, 1, 2, 3)
ADAM = {"exp_avg", "exp_avg_sq", "step"}


def config_of(kind: str, **options: Any) -> dict[str, Any] | str:
    """Return the config of a stage, such as `"zero2"`; other names are strategies of PyTorch's."""
    if not kind.startswith("zero"):
        return kind
    stage = int(kind.removeprefix("zero"))
    # By default DeepSpeed leaves every parameter of a model as small as this one whole.
    zero = {"stage": stage, **({"stage3_param_persistence_threshold": 0} if stage == 3 else {})}
    return {"type": "DeepSpeedStrategy", "zero_optimization": zero, **options}


def strategy_of(kind: str, **options: Any) -> Strategy:
    return build_strategy(config_of(kind, **options))


def train(kind: str, counts: int = 1, clip: bool = False, **options: Any) -> tuple[list[float], list[float]]:
    """Return the losses, as means over the ranks, and the norms of the gradients."""
    losses, norms = train_by_strategy(strategy_of(kind, **options), counts, clip)
    return mean_over_ranks(losses), norms


class Training:
    """A model that has been prepared."""

    def __init__(self, kind: str, optim: dict[str, Any] | None = None, **options: Any) -> None:
        self.strategy = strategy_of(kind, **options)
        self.model, self.optim_wrapper = self.strategy.prepare(seeded(), optim or optim_config())

    def run(self, start: int = 0, stop: int = STEPS) -> list[float]:
        """Return the losses of these steps, as means over the ranks."""
        step = getattr(self.model, "train_step", partial(train_step, self.model))
        batches = own_batches()[start:stop]
        return mean_over_ranks([step(batch, self.optim_wrapper)["loss"].item() for batch in batches])

    def state(self) -> dict[str, Any]:
        return {"model": self.strategy.model_state(), "optimizer": self.strategy.optim_state()}


def save_after(kind: str, path: Path, steps: int, **options: Any) -> tuple[dict[str, Any], list[float]]:
    """Save after some steps; return the state that was saved and the losses of the steps that follow."""
    training = Training(kind, **options)
    training.run(0, steps)
    state = training.state()
    save_state(path, state, {})
    return whole(state), training.run(steps, 2 * steps)


def load_after(kind: str, path: Path, steps: int, **options: Any) -> tuple[dict[str, Any], list[float]]:
    """Load into a model with other weights; return the state that is there then and the losses that follow."""
    training = Training(kind, **options)
    training.run(0, 1)
    loaded = load_state(path, training.state())
    training.strategy.load_state(loaded["model"], loaded["optimizer"])
    return whole(training.state()), training.run(steps, 2 * steps)


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
