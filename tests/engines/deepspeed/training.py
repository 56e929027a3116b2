"""The small transformer under each stage of ZeRO."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lockstep.strategy import Strategy, build_strategy

from ..training import PreparedTraining, train_with, whole

STAGES = (1, 2, 3)
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
    return train_with(strategy_of(kind, **options), counts, clip)


class Training(PreparedTraining):
    """A model that the strategy of a kind has prepared."""

    def __init__(self, kind: str, optim: dict[str, Any] | None = None, **options: Any) -> None:
        super().__init__(strategy_of(kind, **options), optim)


def save_after(kind: str, path: Path, steps: int, **options: Any) -> tuple[dict[str, Any], list[float]]:
    """Save after some steps; return the state that was saved and the losses of the steps that follow."""
    training = Training(kind, **options)
    training.run(0, steps)
    training.save(path)
    return whole(training.state()), training.run(steps, 2 * steps)


def load_after(kind: str, path: Path, steps: int, **options: Any) -> tuple[dict[str, Any], list[float]]:
    """Load into a model with other weights; return the state that is there then and the losses that follow."""
    training = Training(kind, **options)
    training.run(0, 1)
    training.load(path)
    return whole(training.state()), training.run(steps, 2 * steps)
