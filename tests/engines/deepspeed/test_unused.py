"""States under ZeRO of parameters that have no gradient, or have their first one late."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.checkpoint import load_state, save_state
from lockstep.errors import ConfigError
from lockstep.strategy import build_strategy
from lockstep.testing import ranks, run_ranks

from ...strategy.unused import Training
from ..in_turns import check_both_parts_are_trained
from ..training import assert_equal, whole
from .training import config_of

UNUSED = {"unused.weight", "unused.bias"}
LATE = {"late.weight", "late.bias"}
FIRST = {"first.weight", "first.bias"}


def training(kind: str, name: str = "Adam", **options: Any) -> Training:
    cfg = {"type": "ddp", "find_unused_parameters": True} if kind == "ddp" else config_of(kind)
    return Training(build_strategy(cfg), name, **options)


def save_after(kind: str, name: str, path: Path, steps: int) -> tuple[Any, list[float]]:
    made = training(kind, name)
    made.run(0, steps)
    save_state(path, made.state(), {})
    return whole(made.state()), made.run(steps, 7)


def load_after(kind: str, name: str, path: Path, steps: int, used: int = 0) -> tuple[Any, list[float]]:
    made = training(kind, name)
    made.run(0, used)
    state = load_state(path, made.state(), made.strategy.optim_template())
    made.strategy.load_state(state["model"], state["optimizer"])
    return whole(made.state()), made.run(steps, 7)


@pytest.mark.parametrize(
    ("saved_by", "loaded_by"),
    [("ddp", "zero1"), ("fsdp", "zero1"), ("zero1", "fsdp"), ("ddp", "zero3"), ("zero3", "zero2")],
    ids=str,
)
def test_checkpoints_are_resumed_whichever_parameters_have_a_state(saved_by: str, loaded_by: str, tmp_path: Path):
    path = tmp_path / "checkpoint"
    (saved, losses), _ = run_ranks(2, save_after, saved_by, "Adam", path, 3)
    (loaded, loaded_losses), _ = run_ranks(2, load_after, loaded_by, "Adam", path, 3, 1)
    assert_equal(loaded["model"], saved["model"])
    entries, found = saved["optimizer"]["state"], loaded["optimizer"]["state"]
    assert set(entries) == FIRST | (UNUSED | LATE if saved_by.startswith("zero") else set())
    assert set(found) == set(entries) | (UNUSED | LATE if loaded_by in ("zero1", "zero2", "zero3") else set())
    assert_equal({name: found[name] for name in entries}, entries)
    for name in found.keys() - entries.keys():  # ZeRO's part of the group's one state
        assert found[name]["step"] == 3
        assert not found[name]["exp_avg"].any()
    # Until `late` has its first gradient, which is its first step for torch's strategies, but not for DeepSpeed.
    same = slice(None) if saved_by == "zero3" else slice(2)
    assert loaded_losses[same] == pytest.approx(losses[same], abs=1e-6)


@ranks(2)
@pytest.mark.parametrize("name", ["SGD", "NAdam", "ASGD"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_resumed_training_goes_on_exactly(stage: int, name: str, tmp_path: Path):
    kind = f"zero{stage}"
    for steps in (0, 3):
        path = tmp_path / str(steps)
        saved, losses = save_after(kind, name, path, steps)
        assert bool(saved["optimizer"]["state"]) == (steps > 0)
        loaded, loaded_losses = load_after(kind, name, path, steps, used=steps)
        assert_equal(loaded, saved)
        assert loaded_losses == losses


@ranks(2)
@pytest.mark.parametrize("name", ["SGD", "NAdam", "ASGD"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_looking_changes_nothing_at_any_time(stage: int, name: str):
    plain, watched = (training(f"zero{stage}", name, counts=2) for _ in range(2))
    for index in range(6):
        before = watched.everything() if stage < 3 else None
        watched.state()
        if stage < 3:
            assert_equal(watched.everything(), before)
        assert watched.run(index, index + 1) == plain.run(index, index + 1)
    assert_equal(whole(watched.state()), whole(plain.state()))


@ranks(2)
def test_a_group_without_a_common_number_of_steps_is_refused_and_one_with_new_parameters_is_not():
    source = training("ddp", late_from=1)
    source.run(0, 1)
    strategy = training("zero1").strategy
    strategy.load_state(optim_state=source.strategy.optim_state())
    source.run(1, 3)
    with pytest.raises(ConfigError, match=r"'step' must be the same for all parameters of a group.*'late.weight'"):
        strategy.load_state(optim_state=source.strategy.optim_state())
    state = whole(strategy.optim_state())
    assert {float(entry["step"]) for entry in state["state"].values()} == {1.0}


@ranks(2)
def test_rprop_begins_with_its_own_step_size():
    source, made = training("ddp", "Rprop"), training("zero1", "Rprop")
    source.run(0, 2)
    made.strategy.load_state(optim_state=source.strategy.optim_state())
    entry = whole(made.strategy.optim_state())["state"]["unused.bias"]
    assert torch.equal(entry["step_size"], torch.full((3,), 0.05))


@ranks(2)
def test_the_state_of_another_optimizer_is_refused():
    source, made = training("ddp", "SGD"), training("zero1", "Adam")
    source.run(0, 1)
    with pytest.raises(ConfigError, match=r"must have \['exp_avg', .* as Adam keeps it, but has \['momentum_buffer'"):
        made.strategy.load_state(optim_state=source.strategy.optim_state())


@ranks(2)
@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("stage", [1, 2])
def test_what_only_an_earlier_batch_of_a_window_reaches_is_trained(stage: int, overlaps: bool):
    zero = {"stage": stage, "overlap_comm": overlaps}
    check_both_parts_are_trained(build_strategy({"type": "DeepSpeedStrategy", "zero_optimization": zero}))
