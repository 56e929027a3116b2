"""What is saved, and going on from it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lockstep.checkpoint import (
    find_last_checkpoint,
    is_checkpoint,
    load_state,
    read_meta,
    remove_dead_drafts,
    save_state,
)
from lockstep.checkpoint.search import pointing
from lockstep.dist import all_gather_object, get_rank, get_world_size
from lockstep.errors import ConfigError
from lockstep.hooks import Hook
from lockstep.runner import Runner
from lockstep.testing import ranks, run_ranks

from ..runs import Losses

X = torch.randn(24, 3, generator=torch.Generator().manual_seed(1))
Y = X.sum(1, keepdim=True)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.linear = nn.Linear(3, 1)

    def forward(self, x: Tensor, y: Tensor, mode: str = "tensor"):
        out = self.linear(self.norm(x))
        return (out - y).square().mean() if mode == "loss" else (out > 0).flatten().long()


def run(work_dir: Path, stop_after: int | None = None, *hooks: Hook, **changes: Any) -> dict[int, float]:
    torch.manual_seed(3)
    losses = Losses(stop_after)
    arguments = {
        "model": Net(),
        "work_dir": work_dir,
        "train_dataloader": {"dataset": TensorDataset(X, Y), "batch_size": 6 // get_world_size()},
        "optim_wrapper": {"optimizer": {"type": "AdamW", "lr": 0.05}},
        "param_scheduler": [
            {"type": "LinearLR", "by_epoch": False, "end": 5},
            {"type": "MultiStepLR", "milestones": [1, 2]},
        ],
        "train_cfg": {"max_epochs": 3},
        "randomness": {"seed": 7},
        **changes,
    }
    custom = [*hooks, losses]
    runner = Runner(custom_hooks=custom, **arguments)
    try:
        runner.train()
    except KeyboardInterrupt:
        assert stop_after is not None
    return losses.by_iter


CASES = {
    "at an epoch's end": (9, {}, 8),
    "inside an epoch": (6, {"default_hooks": {"checkpoint": {"by_epoch": False, "interval": 3}}}, 6),
    "by iterations": (
        10,
        {
            "train_cfg": {"max_iters": 12},
            "param_scheduler": None,
            "default_hooks": {"checkpoint": {"by_epoch": False, "interval": 5}},
        },
        10,
    ),
}


@ranks(1, 2)
@pytest.mark.parametrize("case", CASES)
def test_a_run_that_goes_on_is_the_run_that_never_stopped(tmp_path: Path, case):
    stop_after, changes, resumed_at = CASES[case]
    whole = run(tmp_path / "whole", **changes)
    assert set(whole) == set(range(12))
    first = run(tmp_path / "work", stop_after, **changes)
    # The seed is that of the run that is resumed.
    second = run(tmp_path / "work", resume=True, **{**changes, "randomness": None})
    assert min(second) == resumed_at
    assert first | second == whole


class Validated(Hook):
    """Notes after how many iterations a model was validated."""

    def __init__(self) -> None:
        self.at: list[int] = []

    def before_val(self, runner) -> None:
        self.at.append(runner.iter)


EPOCHS, ITERATIONS = {"max_epochs": 3}, {"max_iters": 12, "val_interval": 4}
BEST = {"by_epoch": False, "interval": 99, "save_best": "accuracy"}
# Checkpoints, the iteration after which the run ends, when it was validated, and when the one is that goes on.
MISSED = {
    "at an epoch's end": (EPOCHS, {}, 9, [4, 8], [8, 12]),
    "with an epoch's last iteration": (EPOCHS, {"by_epoch": False, "interval": 4}, 9, [4, 8], [8, 12]),
    "inside an epoch": (EPOCHS, {"by_epoch": False, "interval": 3}, 6, [4], [8, 12]),
    "after it": (EPOCHS, BEST, 6, [4], [8, 12]),
    "by iterations": (ITERATIONS, {"by_epoch": False, "interval": 4}, 8, [4], [8, 12]),
    "by iterations, none due": (ITERATIONS, {"by_epoch": False, "interval": 3}, 9, [4, 8], [12]),
    "at an epoch's end, shorter epochs": (EPOCHS, {}, 9, [4, 8], [8, 10]),
    "after it, shorter epochs": (EPOCHS, BEST, 6, [4], [6, 8]),
    "of a finished run": (EPOCHS, {}, None, [4, 8, 12], [12]),
}


@pytest.mark.parametrize("case", MISSED)
def test_a_validation_between_the_checkpoint_and_the_end_is_made_up_for(tmp_path: Path, case):
    train_cfg, checkpoint, stop_after, first, then = MISSED[case]
    validating: dict[str, Any] = {
        "train_cfg": train_cfg,
        "param_scheduler": None,
        "default_hooks": {"checkpoint": checkpoint},
        "val_dataloader": {"dataset": TensorDataset(X, (Y > 0).flatten().long()), "batch_size": 8},
        "val_evaluator": {"type": "Accuracy"},
    }
    before, after = Validated(), Validated()
    run(tmp_path, stop_after, before, **validating)
    if "shorter" in case:
        validating["train_dataloader"] = {"dataset": TensorDataset(X, Y), "batch_size": 12}
    best = next(tmp_path.glob("*/best_*"), None)
    run(tmp_path, None, after, resume=True, load_from=best, **validating)
    assert (before.at, after.at) == (first, then)


@ranks(2)
def test_there_is_nothing_to_resume_at_first(tmp_path: Path):
    assert set(run(tmp_path, resume=True)) == set(range(12))
    log = next(tmp_path.glob("*/log.txt")).read_text()
    assert f"no checkpoint to resume from in {tmp_path}: training begins anew" in log


def last(work_dir: Path) -> Path:
    found = find_last_checkpoint(work_dir)
    assert found is not None
    return found


def test_a_checkpoint_of_two_ranks_resumes_on_any_number(tmp_path: Path):
    run_ranks(2, run, tmp_path, stop_after=9)
    checkpoint = last(tmp_path)
    assert checkpoint.name == "epoch_2"
    for size in (1, 3):
        for losses in run_ranks(size, run, tmp_path / str(size), load_from=checkpoint, resume=True):
            assert set(losses) == {8, 9, 10, 11}


@ranks(2)
def test_weights_alone_are_loaded_from_a_checkpoint_or_a_file(tmp_path: Path):
    run(tmp_path)
    all_gather_object(None)  # rank 0 says which checkpoint is the last when all have written theirs
    trained = load_state(last(tmp_path), {"model": Net().state_dict()})["model"]
    if get_rank() == 0:
        torch.save({"state_dict": {f"module.{k}": v for k, v in trained.items()}}, tmp_path / "net.pth")
        torch.save(trained, tmp_path / "bare.pth")
        torch.save({"epoch": 3}, tmp_path / "none.pth")
    all_gather_object(None)
    for path in (last(tmp_path), tmp_path / "net.pth", tmp_path / "bare.pth"):
        model = Net()
        torch.nn.init.zeros_(model.linear.weight)
        runner = Runner(
            model,
            tmp_path / "val",
            val_dataloader={"dataset": TensorDataset(X, Y.flatten() > 0)},
            val_evaluator={"type": "Accuracy"},
            load_from=path,
        )
        runner.val()
        assert torch.equal(model.linear.weight, trained["linear.weight"])
        assert torch.equal(model.norm.running_mean, trained["norm.running_mean"])
    with pytest.raises(ConfigError, match="must hold weights, as a dict of tensors"):
        run(tmp_path, load_from=tmp_path / "none.pth")


def test_names_in_a_checkpoint_are_the_models_own(tmp_path: Path):
    run_ranks(2, run, tmp_path)
    names = set(json.loads((last(tmp_path) / "manifest.json").read_text())["tensors"])
    assert {"model.linear.weight", "optimizer.state.linear.weight.exp_avg", "model.norm.running_var"} <= names
    assert not [name for name in names if "module." in name]


class Wider(Net):
    def __init__(self) -> None:
        super().__init__()
        self.more = nn.Linear(1, 1)


@ranks(1, 2)
@pytest.mark.parametrize("in_a_file", [False, True])
def test_training_begins_with_the_weights_that_fit_and_evaluation_needs_all(in_a_file, tmp_path: Path):
    run(tmp_path)
    all_gather_object(None)
    source = last(tmp_path)
    if in_a_file:
        trained = load_state(source, {"model": Net().state_dict()})["model"]
        source = tmp_path / "net.pth"
        if get_rank() == 0:
            torch.save({"state_dict": trained}, source)
        all_gather_object(None)
    model = Wider()
    model.norm = nn.BatchNorm1d(5)  # of another shape
    evaluation = {
        "val_dataloader": {"dataset": TensorDataset(X, Y.flatten() > 0)},
        "val_evaluator": {"type": "Accuracy"},
    }
    failed = Runner(model, tmp_path / "val", load_from=source, **evaluation)
    with pytest.raises(
        ConfigError, match=r"fit the model \(missing: more\.weight, more\.bias; of another shape: norm\.weight"
    ):
        failed.val()
    with pytest.raises(ConfigError, match="fit the model"):  # nor is it evaluated without them
        failed.val()
    shared = nn.Module()
    shared.linear = nn.Linear(7, 1)
    shared.forward = shared.linear.forward  # type: ignore[method-assign]
    with pytest.raises(
        ConfigError, match=r"of another shape: linear\.weight \(1, 3\), not \(1, 7\); unknown to the model: "
    ):
        Runner(shared, tmp_path / "val", load_from=source, **evaluation).val()
    wider = Wider()
    before = wider.more.weight.detach().clone()
    runner = Runner(wider, tmp_path / "val", **evaluation)
    runner.load_checkpoint(source, strict=False)
    runner.val()
    assert torch.equal(wider.more.weight, before)
    fresh = Wider()
    run(tmp_path / "on", model=fresh, load_from=source, strategy={"type": "ddp", "find_unused_parameters": True},
        train_cfg={"max_iters": 1}, optim_wrapper={"optimizer": {"type": "SGD", "lr": 0.0}}, param_scheduler=None,
        default_hooks={"checkpoint": None})  # fmt: skip
    assert torch.equal(fresh.linear.weight, wider.linear.weight)


def test_names_in_a_file_of_weights_are_revised(tmp_path: Path):
    torch.save({f"backbone.{name}": value + 1 for name, value in Net().state_dict().items()}, tmp_path / "net.pth")
    model = Net()
    runner = Runner(
        model,
        tmp_path,
        val_dataloader={"dataset": TensorDataset(X, Y.flatten() > 0)},
        val_evaluator={"type": "Accuracy"},
    )
    runner.load_checkpoint(tmp_path / "net.pth", revise_keys=[(r"^backbone\.", "")])
    runner.val()
    assert model.norm.running_mean.tolist() == [1.0] * len(model.norm.running_mean)


@ranks(2)
def test_what_does_not_fit_is_said_on_every_rank(tmp_path: Path):
    run(tmp_path)
    with pytest.raises(ConfigError, match=r"does not fit: .*more.weight"):
        run(tmp_path, model=Wider(), resume=True, strategy={"type": "ddp", "find_unused_parameters": True})
    with pytest.raises(ConfigError, match=r"must have 2 schedulers to resume.*but has 0"):
        run(tmp_path, resume=True, param_scheduler=None, resume_options="checkpoint")
    with pytest.raises(ConfigError, match=r"`load_from` must be a checkpoint, .*nowhere does not exist"):
        run(tmp_path, resume=True, load_from=tmp_path / "nowhere")
    for resume in (True, False):
        with pytest.raises(ConfigError, match=r"does not exist.*\. There is .*/epoch_3\b"):
            run(tmp_path, resume=resume, load_from=tmp_path / "epoch_3.pth")
    assert all_gather_object(get_rank()) == [0, 1]


@ranks(1, 2)
def test_a_checkpoint_is_replaced_whole(tmp_path: Path):
    directory = tmp_path / "state"
    for value in (1.0, 2.0):
        save_state(directory, {"model": {"w": torch.full((3,), value)}}, {"value": value})
        assert is_checkpoint(directory)
        read = load_state(directory, {"model": {"w": torch.zeros(3)}})
        assert read["model"]["w"].tolist() == [value] * 3
        assert read_meta(directory) == {"value": value}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["state"]


@ranks(2)
def test_a_checkpoint_that_cannot_be_written_is_an_error_on_every_rank(tmp_path: Path):
    (tmp_path / "file").touch(exist_ok=True)
    with pytest.raises((OSError, RuntimeError), match="file"):
        save_state(tmp_path / "file" / "state", {"w": torch.ones(1)}, {})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file"]
    assert all_gather_object(get_rank()) == [0, 1]


KILLED = """
import os, signal, sys
from pathlib import Path
import torch
import lockstep.checkpoint.saving as saving
from lockstep.checkpoint.drafts import FolderDraft

target = Path(sys.argv[1])
saving.save_state(target, {"w": torch.ones(1)}, {"n": 1})
FolderDraft.publish = lambda *args: os.kill(os.getpid(), signal.SIGKILL)
saving.save_state(target, {"w": torch.zeros(1)}, {"n": 2})
"""


def test_a_process_killed_while_saving_loses_nothing(tmp_path: Path):
    target = tmp_path / "state"
    done = subprocess.run([sys.executable, "-c", KILLED, str(target)], env=os.environ, check=False)
    assert done.returncode == -signal.SIGKILL
    assert read_meta(target) == {"n": 1}
    assert load_state(target, {"w": torch.zeros(1)})["w"].tolist() == [1.0]
    (draft,) = remove_dead_drafts([tmp_path])
    assert draft.name.startswith(".state.draft.")
    save_state(target, {"w": torch.full((1,), 3.0)}, {"n": 3})
    assert read_meta(target) == {"n": 3}
    assert [path.name for path in tmp_path.iterdir()] == ["state"]


def test_the_last_checkpoint_is_found_where_the_work_dir_is_moved(tmp_path: Path):
    run(tmp_path / "before")
    (tmp_path / "before").rename(tmp_path / "after")
    assert last(tmp_path / "after").name == "epoch_3"
    with pointing(tmp_path / "after", tmp_path / "after" / "gone" / "epoch_9"):
        pass
    assert find_last_checkpoint(tmp_path / "after") is None
    assert find_last_checkpoint(tmp_path) is None


def test_the_manifest_is_plain_json(tmp_path: Path):
    run(tmp_path)
    manifest = json.loads((last(tmp_path) / "manifest.json").read_text())
    assert manifest["format"] == 3
    meta = manifest["meta"]
    assert meta == read_meta(last(tmp_path))
    assert meta["strategy"] == "SingleDeviceStrategy"
    assert (meta["epoch"], meta["iter"], meta["seed"], meta["world_size"]) == (3, 12, 7, 1)
    assert len(meta["param_schedulers"]) == 2
