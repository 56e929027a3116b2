"""Which checkpoint a run goes on from: the last one, else the newest that is whole; those passed over are named."""

from __future__ import annotations

import errno
import itertools
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from lockstep.checkpoint import drafts, find_checkpoints, find_last_checkpoint, is_checkpoint, manifest, save_state
from lockstep.checkpoint import saving as saving_module
from lockstep.dist import all_gather_object, get_rank, get_world_size, main_process_first
from lockstep.errors import ConfigError
from lockstep.hooks import CheckpointHook, Hook
from lockstep.launch.worker import RESUME_SINCE, RUNS_FILE
from lockstep.registry import HOOKS
from lockstep.runner import Runner
from lockstep.runner.resume_from import find_resumption
from lockstep.testing import ranks
from lockstep.weights import find_checkpoint

from ..runs import RESUMABLE, Losses


def data() -> tuple[TensorDataset, nn.Module]:
    torch.manual_seed(0)
    x = torch.randn(16, 3)
    return TensorDataset(x, x.sum(1, keepdim=True)), nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))


def train(work_dir: Path, epochs: int, *hooks: Hook, stop_after: int | None = None, **changes: Any) -> Runner:
    dataset, net = data()
    arguments = {
        "loss": nn.MSELoss(),
        "train_dataloader": {"dataset": dataset, "batch_size": 2},
        "optim_wrapper": {"optimizer": {"type": "AdamW", "lr": 0.05}},
        "train_cfg": {"max_epochs": epochs},
        **changes,
    }
    losses = Losses(stop_after)
    registered = arguments.pop("registered", None)
    runner = Runner(net, work_dir, custom_hooks=[*hooks, losses], **arguments)
    if registered is not None:
        runner.register_hook(registered)
    try:
        runner.train()
    except KeyboardInterrupt:
        assert stop_after is not None
    runner.losses = losses.by_iter
    return runner


def saved(work_dir: Path) -> list[Path]:
    """Write three checkpoints of two runs."""
    made = []
    for number, run in enumerate(["20260101_000000", "20260101_000000", "20260102_000000"], 1):
        made.append(work_dir / run / f"epoch_{number}")
        state = {"model": {"w": torch.full((300,), float(number))}, "ranks": {"0": {"n": number}}}
        save_state(made[-1], state, RESUMABLE, last_of=work_dir)
    return made


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path, rng: random.Random) -> None:
    content = bytearray(path.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "truncated": truncate,
    "empty": lambda path: path.write_bytes(b""),
    "missing": Path.unlink,
    **{f"flipped {n}": lambda path, n=n: flip(path, random.Random(n)) for n in range(20)},
}


@pytest.mark.parametrize(
    ("part", "damage"),
    [
        *itertools.product(["manifest.json", "last_checkpoint"], DAMAGES),
        *(("rank_0.safetensors", damage) for damage in DAMAGES if "flipped" not in damage),  # found when it is read
    ],
)
def test_the_newest_whole_one_is_found_and_faults_are_named(part: str, damage: str, tmp_path: Path):
    first, second, third = saved(tmp_path)
    broken = tmp_path / part if part == "last_checkpoint" else third / part
    DAMAGES[damage](broken)
    stored, faults = find_resumption(None, [tmp_path])
    assert stored is not None
    found = stored.directory
    if part == "last_checkpoint":
        assert found == third
        assert damage == "missing" or str(broken) in faults[0]
    else:
        assert found == second
        assert len(faults) == 1
        assert str(third) in faults[0]
        assert (str(broken) in faults[0]) or (damage == "missing" and "has none" in faults[0])
    assert first.is_dir()


@ranks(4)
def test_each_rank_looks_only_at_files_that_it_reads_and_the_first_one_at_all(tmp_path: Path):
    state = {"model": {}, "ranks": {str(get_rank()): {"x": torch.full((1000,), float(get_rank()))}}}
    save_state(tmp_path / "run" / "epoch_1", state, {**RESUMABLE, "world_size": 4}, last_of=tmp_path)
    seen, lstat = set(), Path.lstat
    with patch.object(Path, "lstat", lambda path: seen.add(path.name) or lstat(path)):
        stored, _ = find_resumption(None, [tmp_path])
    assert stored is not None
    files = all_gather_object(len(seen.intersection(stored.manifest.files)))
    assert files[0] == 4
    assert max(files[1:]) <= 2


def test_weights_come_from_a_whole_checkpoint_in_a_runs_folder(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    first, second, _ = saved(tmp_path)
    assert find_checkpoint(first.parent) == second
    truncate(second / "manifest.json")
    assert find_checkpoint(first.parent) == first
    assert f"checkpoints whose manifest is damaged are left out: {second}" in caplog.text
    truncate(first / "manifest.json")
    assert find_checkpoint(first.parent) in (first, second)  # to say what is wrong with it


def test_where_none_is_whole_it_is_an_error(tmp_path: Path):
    for path in saved(tmp_path):
        (path / "rank_0.safetensors").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"must find a whole checkpoint in .*epoch_3.*epoch_2.*epoch_1"):
        train(tmp_path, 1, resume=True)
    assert find_resumption(None, [tmp_path / "nowhere"]) == (None, [])
    # Ranks that start again go on from what their job has saved, and do not begin anew in silence.
    with (
        patch.dict("os.environ", {RESUME_SINCE: "1"}),
        pytest.raises(ConfigError, match=r"ranks that start again must find a whole checkpoint of .*epoch_3.*epoch_1"),
    ):
        train(tmp_path, 1)


def test_ranks_that_start_again_pass_over_what_another_job_has_saved_in_the_work_dir(tmp_path: Path):
    runs = tmp_path / "runs"
    with patch.dict("os.environ", {RUNS_FILE: str(runs), "LOCAL_RANK": "0"}):
        own = train(tmp_path / "work", 1)
    train(tmp_path / "work", 2)  # of another job, and newer
    assert runs.read_text() == f"{own.run_dir.name}\n"
    with patch.dict("os.environ", {RUNS_FILE: str(runs), "LOCAL_RANK": "0", RESUME_SINCE: "1"}):
        again = train(tmp_path / "work", 2)
    assert min(again.losses) == max(own.losses) + 1
    assert runs.read_text().splitlines() == [own.run_dir.name, again.run_dir.name]


@pytest.mark.parametrize("kind", ["checkpoint", "weights"])
@ranks(2)
def test_the_same_command_goes_on_where_a_training_that_began_elsewhere_was_stopped(kind: str, tmp_path: Path):
    before = train(tmp_path / "before", 1)
    beginning: Path = before.run_dir / "epoch_1"
    if kind == "weights":
        beginning = tmp_path / "weights.pth"
        with main_process_first():
            if get_rank() == 0:
                torch.save(before.run.model.module.state_dict(), beginning)
    options: dict[str, Any] = {"load_from": beginning, "resume": True, "randomness": {"seed": 5}}
    whole = train(tmp_path / "whole", 4, **options).losses
    assert min(whole) == (4 if kind == "checkpoint" else 0)
    train(tmp_path / "work", 2, randomness={"seed": 5})  # began elsewhere, so that nothing of it is gone on with
    first = train(tmp_path / "work", 2, **options)
    rest = train(tmp_path / "work", 4, **options)
    assert not first.losses.keys() & rest.losses.keys()
    assert {**first.losses, **rest.losses} == whole


def test_a_damaged_checkpoint_is_not_taken_for_weights(tmp_path: Path):
    first = train(tmp_path / "before", 1)
    (first.run_dir / "epoch_1" / "manifest.json").unlink()
    with pytest.raises(
        ConfigError, match=r"`load_from` must be a checkpoint, .*epoch_1 is a folder without a complete"
    ):
        train(tmp_path / "work", 1, load_from=first.run_dir / "epoch_1", resume=True)


@ranks(2)
def test_a_rank_reads_the_manifest_once_and_rank_0_once_more_to_choose(tmp_path: Path):
    train(tmp_path, 1)
    with patch.object(manifest, "read_plain_file", side_effect=manifest.read_plain_file) as read:
        runner = train(tmp_path, 2, resume=True)
    assert min(runner.losses) == 4
    assert [call.args[0].name for call in read.call_args_list] == ["manifest.json"] * (2 - get_rank())


def test_a_runner_that_has_validated_still_goes_on_from_there(tmp_path: Path):
    train(tmp_path, 1)
    dataset, net = data()
    losses, loader = Losses(), {"dataset": dataset, "batch_size": 2}
    runner = Runner(
        net, tmp_path, train_dataloader=loader, val_dataloader=loader, loss=nn.MSELoss(), resume=True,
        train_cfg={"max_epochs": 2}, optim_wrapper={"optimizer": {"type": "AdamW", "lr": 0.05}}, custom_hooks=[losses],
    )  # fmt: skip
    runner.val()
    runner.train()
    assert sorted(losses.by_iter) == list(range(8, 16))


@ranks(2)
def test_a_run_goes_on_from_an_older_one_and_says_so_on_every_rank(tmp_path: Path):
    train(tmp_path, 3, stop_after=11)
    with main_process_first():
        if get_rank() == 0:
            last = find_last_checkpoint(tmp_path)
            assert last.name == "epoch_2"
            flip(last / "rank_1.safetensors", random.Random(1))
    runner = train(tmp_path, 3, resume=True)
    assert min(runner.losses) == 4
    name = "log.txt" if get_rank() == 0 else "log_rank1.txt"
    assert "not resumed from: " in (runner.run_dir / name).read_text()
    assert "epoch_2/rank_1.safetensors has wrong bytes between" in (runner.run_dir / name).read_text()


def regular(work_dir: Path) -> list[str]:
    all_gather_object(None)  # rank 0 removes
    return [one.name for one in reversed(find_checkpoints([work_dir]))]


@ranks(1, 2)
def test_checkpoints_of_the_runs_before_are_counted(tmp_path: Path):
    keeping = {"default_hooks": {"checkpoint": {"by_epoch": False, "interval": 3, "max_keep_ckpts": 2}}}
    work_dir = tmp_path / "work"
    per_epoch = 8 // get_world_size()
    train(tmp_path / "work", 1, resume=True, **keeping)
    ends = [per_epoch * epochs for epochs in (1, 2, 3)]
    assert regular(work_dir)[-1] == f"iter_{ends[0]}"
    for epochs in (2, 3):
        train(work_dir, epochs, resume=True, **keeping)
        names = regular(work_dir)
        assert len(names) == 2
        assert names[-1] == f"iter_{ends[epochs - 1]}"
    # A run that does not go on from them leaves them alone, and so does a hook that names its own in another way.
    train(work_dir, 1, **keeping)
    assert len(regular(work_dir)) == 4
    by_epoch = {"default_hooks": {"checkpoint": {"interval": 1, "max_keep_ckpts": 1}}}
    train(work_dir, 4, resume=True, load_from=find_checkpoints([work_dir])[-1], **by_epoch)
    assert len(regular(work_dir)) == 5


class SavesAt(Hook):
    """Saves after an iteration, as a stop by a signal does, or a user's own code."""

    def __init__(self, done: int, is_stop: bool = True) -> None:
        self.done, self.is_stop = done, is_stop

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        if runner.iter + 1 == self.done:
            runner.saving.is_stopping = self.is_stop
            runner.save_checkpoint(runner.run_dir, f"iter_{self.done}", epoch=runner.epoch, iteration=self.done)
            runner.saving.is_stopping = False


@ranks(2)
def test_checkpoints_of_stops_are_counted_once_a_run_has_gone_on_from_them(tmp_path: Path):
    keeping = {"default_hooks": {"checkpoint": {"interval": 1, "max_keep_ckpts": 2}}}
    train(tmp_path, 3, SavesAt(1), stop_after=1, **keeping)
    train(tmp_path, 3, SavesAt(2), stop_after=2, resume=True, **keeping)
    assert regular(tmp_path) == ["iter_1", "iter_2"]
    train(tmp_path, 3, SavesAt(6), stop_after=6, resume=True, **keeping)
    assert regular(tmp_path) == ["iter_2", "epoch_1", "iter_6"]  # nothing has gone on from the last one yet
    assert min(train(tmp_path, 3, resume=True, **keeping).losses) == 6
    assert regular(tmp_path) == ["epoch_2", "epoch_3"]


@ranks(2)
def test_checkpoints_that_the_user_has_saved_are_never_removed(tmp_path: Path):
    keeping = {"default_hooks": {"checkpoint": {"interval": 1, "max_keep_ckpts": 1}}}
    train(tmp_path, 3, SavesAt(1, is_stop=False), stop_after=1, **keeping)
    assert min(train(tmp_path, 2, resume=True, **keeping).losses) == 1
    assert regular(tmp_path) == ["iter_1", "epoch_2"]


@HOOKS.register_module()
class SavesElsewhere(CheckpointHook):
    pass


@pytest.mark.parametrize("hook", ["default", "class", "subclass", "registered"])
def test_checkpoints_outside_of_the_work_dir_are_found(hook: str, tmp_path: Path):
    config = {"interval": 1, "max_keep_ckpts": 1, "out_dir": tmp_path / "disk"}
    kinds = {"class": CheckpointHook, "subclass": "SavesElsewhere"}
    given = {**config, "type": kinds[hook]} if hook in kinds else config
    saving = {"default_hooks": {"checkpoint": None if hook == "registered" else given}}
    registered = [CheckpointHook(**config) for _ in range(2)] if hook == "registered" else [None, None]
    train(tmp_path / "work", 1, registered=registered[0], **saving)
    runner = train(tmp_path / "work", 2, resume=True, registered=registered[1], **saving)
    assert min(runner.losses) == 8
    assert regular(tmp_path / "disk" / "work") == ["epoch_2"]
    with pytest.raises(ConfigError, match=r"leads out of it.*by the `out_dir` of CheckpointHook"):
        train(tmp_path / "work", 3, resume=True)


@ranks(2)
@pytest.mark.parametrize("choice", ["raise", "warn"])
def test_training_may_go_on_without_a_checkpoint_that_cannot_be_written(choice: str, tmp_path: Path):
    class Full(saving_module._Checksums):
        def update(self, band: memoryview) -> None:
            if get_rank() == 1 and counts["saves"] == 2:
                raise OSError(errno.ENOSPC, "No space left on device")
            super().update(band)

    class Count(Hook):
        def before_save_checkpoint(self, runner: Any, checkpoint: dict[str, Any]) -> None:
            counts["saves"] += 1

    counts = {"saves": 0}
    options = {"default_hooks": {"checkpoint": {"interval": 1, "on_save_error": choice}}}
    with patch.object(saving_module, "_Checksums", Full):
        if choice == "raise":
            with pytest.raises(OSError, match=r"epoch_2 could not be written: rank 1: No space"):
                train(tmp_path, 3, Count(), **options)
        else:
            runner = train(tmp_path, 3, Count(), **options)
            assert "Training goes on without it" in next(runner.run_dir.glob("log*.txt")).read_text()
    all_gather_object(None)
    assert regular(tmp_path) == (["epoch_1"] if choice == "raise" else ["epoch_1", "epoch_3"])
    assert not list(tmp_path.glob("*/.*"))


def test_drafts_of_dead_runs_are_removed_before_anything_is_written(tmp_path: Path):
    dead = tmp_path / "20260101_000000" / ".epoch_1.draft.4194303.1.here"
    dead.mkdir(parents=True)
    shutil.copytree(dead, dead.with_name(dead.name.replace("here", "elsewhere")))
    with patch.object(drafts, "_host", lambda: "here"):
        runner = train(tmp_path, 1)
    assert not dead.exists()
    assert len(list(dead.parent.iterdir())) == 1  # of another host, and young
    assert is_checkpoint(runner.run_dir / "epoch_1")


def test_the_best_is_never_removed_with_the_runs_before(tmp_path: Path):
    class Best(Hook):
        def after_train_epoch(self, runner: Any) -> None:
            if runner.epoch == 0 and runner.resume_from is None:
                runner.save_checkpoint(runner.run_dir, "epoch_7", is_last=False)

    keeping = {"default_hooks": {"checkpoint": {"interval": 1, "max_keep_ckpts": 1}}}
    first = train(tmp_path, 1, Best(), **keeping)
    hook = next(one for one in first.run.hooks if type(one).__name__ == "CheckpointHook")
    assert regular(tmp_path) in (["epoch_7", "epoch_1"], ["epoch_1", "epoch_7"])
    hook._best["loss"] = {"value": 0.0, "path": str(first.run_dir / "epoch_7")}
    hook._former_runs = [{"run": first.run_dir.name, "epoch": 9, "iter": 99}]
    assert hook._former_checkpoints(first.run, "epoch_{}") == [first.run_dir / "epoch_1"]
