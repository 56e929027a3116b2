"""States under ColossalAI of parameters that have no gradient, or have their first one late."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from lockstep.checkpoint import load_state, save_state
from lockstep.strategy import build_strategy
from lockstep.strategy.colossalai import engine
from lockstep.testing import ranks, run_ranks

from ...strategy.unused import Training
from ..in_turns import check_both_parts_are_trained
from ..training import assert_equal, whole
from .training import strategy_of

CASES = [
    ("zero1", "SGD"),
    ("zero1", "ASGD"),
    ("zero1", "NAdam"),
    ("zero2", "AMSGrad"),
]
FIRST = {"first.weight", "first.bias"}


def training(kind: str, name: str = "Adam", **options: Any) -> Training:
    if kind == "native":
        return Training(build_strategy({"type": "ddp", "find_unused_parameters": True}), name, **options)
    return Training(strategy_of(kind), name, **options)


def save_after(kind: str, name: str, path: Path, steps: int) -> tuple[Any, list[float]]:
    made = training(kind, name)
    made.run(0, steps)
    save_state(path, made.state(), {})
    return whole(made.state()), made.run(steps, 7)


def load_after(kind: str, name: str, path: Path, steps: int, used: int = 0) -> tuple[Any, list[float]]:
    made = training(kind, name, late_from=4 if not used else 0)
    made.run(0, used)
    made._late_from = 4
    state = load_state(path, made.state(), made.strategy.optim_template())
    made.strategy.load_state(state["model"], state["optimizer"])
    return whole(made.state()), made.run(steps, 7)


@pytest.mark.parametrize("kind", ["zero1", "zero2"])
def test_checkpoints_are_resumed_whichever_parameters_have_a_state(kind: str, tmp_path: Path):
    for saved_by, loaded_by in ((kind, "native"), ("native", kind)):
        path = tmp_path / saved_by
        (saved, losses), _ = run_ranks(2, save_after, saved_by, "Adam", path, 3)
        (loaded, loaded_losses), _ = run_ranks(2, load_after, loaded_by, "Adam", path, 3, 1)
        assert set(saved["optimizer"]["state"]) == FIRST
        assert_equal(loaded["model"], saved["model"])
        assert_equal(loaded["optimizer"]["state"], saved["optimizer"]["state"])
        assert loaded_losses == pytest.approx(losses, abs=1e-6)


@ranks(2)
@pytest.mark.parametrize(("kind", "name"), CASES)
def test_a_resumed_training_goes_on_exactly(kind: str, name: str, tmp_path: Path):
    for steps in (0, 3):
        path = tmp_path / str(steps)
        saved, losses = save_after(kind, name, path, steps)
        loaded, loaded_losses = load_after(kind, name, path, steps, used=steps)
        assert_equal(loaded, saved)
        assert loaded_losses == losses


@ranks(2)
@pytest.mark.parametrize(("kind", "name"), CASES)
def test_looking_changes_nothing_at_any_time(kind: str, name: str):
    plain, watched = (training(kind, name, counts=2) for _ in range(2))
    for index in range(6):
        before = watched.everything()
        watched.state()
        assert_equal(watched.everything(), before)
        assert watched.run(index, index + 1) == plain.run(index, index + 1)
    assert_equal(whole(watched.state()), whole(plain.state()))


class Stream:
    """Stands for a stream of the host, which ColossalAI needs where it overlaps."""

    def wait_stream(self, other: Stream) -> None:
        """All is done already."""


@ranks(2)
@pytest.mark.parametrize("overlaps", [False, True])  # as on GPUs
def test_what_only_an_earlier_batch_of_a_window_reaches_is_trained(overlaps: bool):
    with pytest.MonkeyPatch.context() as patch:
        if overlaps:
            engine.require_engine()
            accelerator = type(importlib.import_module("colossalai.accelerator").get_accelerator())
            patch.setattr(accelerator, "Stream", lambda *_: Stream())
            patch.setattr(accelerator, "current_stream", lambda *_: Stream())
            patch.setattr(Tensor, "record_stream", lambda *_: None)
            patch.setattr(engine, "has_streams", lambda: True)
        check_both_parts_are_trained(strategy_of("zero1"))
