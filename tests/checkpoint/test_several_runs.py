"""Several runs in one work_dir: each saves, and what one has removed another one calls so."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lockstep.checkpoint import find_last_checkpoint, load_state, remove, remove_dead_drafts, save_state, verify
from lockstep.checkpoint.drafts import name_of_draft
from lockstep.errors import ConfigError
from lockstep.location import locate
from lockstep.runner import Runner
from lockstep.testing import ranks

SAVES = r"""
import sys
from pathlib import Path
import torch
from lockstep.checkpoint import save_state
work_dir, name = Path(sys.argv[1]), sys.argv[2]
input()
for i in range(25):
    save_state(work_dir / name / f"iter_{i}", {"model": {"w": torch.ones(3)}}, {"iter": i}, last_of=work_dir)
"""


def test_three_processes_save_in_one_work_dir_at_once(tmp_path: Path):
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", SAVES, str(tmp_path), name], stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for name in ("one", "two", "three")
    ]
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    assert [process.communicate()[1] for process in processes] == ["", "", ""]
    last = find_last_checkpoint(tmp_path)
    assert last is not None
    verify(last)
    assert not list(tmp_path.glob(".*"))


def saved(directory: Path, value: float = 1.0, **options: Any) -> Path:
    save_state(directory, {"model": {"w": torch.full((3,), value)}}, {"iter": 1}, **options)
    return directory


def test_what_another_run_has_removed_is_removed(tmp_path: Path):
    directory = saved(tmp_path / "epoch_1")
    for _ in range(2):
        remove(directory)
        assert not list(tmp_path.iterdir())


def test_a_checkpoint_of_the_same_name_replaces_all_files(tmp_path: Path):
    directory = saved(tmp_path / "latest", 1.0)
    saved(directory, 2.0)
    loaded = load_state(directory, {"model": {"w": torch.zeros(3)}})
    assert loaded["model"]["w"].tolist() == [2.0] * 3
    assert len(list(directory.iterdir())) == 2


def test_the_draft_of_a_pointer_is_removed_when_its_process_has_ended(tmp_path: Path):
    own, dead = (tmp_path / name_of_draft("last_checkpoint") for _ in range(2))
    pid, began = own.name.split(".")[3:5]
    dead = tmp_path / own.name.replace(f".{pid}.{began}.", f".{pid}.{int(began) + 1}.")
    own.touch()
    dead.touch()
    remove_dead_drafts([tmp_path])
    assert [own.exists(), dead.exists()] == [True, False]


def trained(work_dir: Path, epochs: int, **arguments: Any) -> Runner:
    x = torch.ones(8, 3)
    data = {"dataset": torch.utils.data.TensorDataset(x, x[:, :1]), "batch_size": 2}
    runner = Runner(
        nn.Linear(3, 1),
        work_dir,
        loss=nn.MSELoss(),
        train_dataloader=data,
        train_cfg={"max_epochs": epochs},
        **arguments,
    )
    runner.train()
    return runner


def test_what_was_removed_is_called_removed(tmp_path: Path):
    first = trained(tmp_path, 2)
    last = find_last_checkpoint(tmp_path)
    assert last is not None
    remove(last)
    resumed = trained(tmp_path, 3, resume=True)
    assert resumed.run.resume_from == first.run_dir / "epoch_1"
    (skipped,) = resumed.run.skipped
    assert skipped.startswith(f"{last} has been removed, as `max_keep_ckpts` of a run does")


@pytest.mark.parametrize("where", ["{folder}", "memory://several/{name}"])
def test_a_checkpoint_that_vanishes_while_it_is_read_is_called_removed(where: str, tmp_path: Path):
    from lockstep.checkpoint.loading import open_checkpoint, read_whole

    directory = locate(where.format(folder=tmp_path / "epoch_1", name=tmp_path.name))
    save_state(directory, {"model": {"w": torch.ones(3)}}, {"iter": 1})
    stored = open_checkpoint(directory)
    remove(directory)
    with pytest.raises(ConfigError, match=r"has been removed, as `max_keep_ckpts` of a run does with old checkpoints"):
        read_whole(stored, "model.w")


def test_what_cannot_be_read_is_not_called_removed(tmp_path: Path):
    last = tmp_path / "epoch_1"
    last.symlink_to(last)  # nobody can tell what is in it, as of a folder of another user
    with pytest.raises(ConfigError, match=r"epoch_1/manifest\.json cannot be read: Too many levels of symbolic links"):
        verify(last)


@ranks(2)
def test_two_ranks_remove_what_they_have_resumed_from(tmp_path: Path):
    hook = {"checkpoint": {"max_keep_ckpts": 1}}
    trained(tmp_path, 2, default_hooks=hook)
    resumed = trained(tmp_path, 3, resume=True, default_hooks=hook)
    assert [path.name for path in sorted(tmp_path.glob("*/epoch_*"))] == ["epoch_3"]
    assert resumed.epoch == 3


def test_what_a_run_has_saved_after_another_went_on_from_it_stays(tmp_path: Path):
    first = trained(tmp_path, 4)
    keep = {"checkpoint": {"max_keep_ckpts": 1}}
    second = trained(tmp_path, 3, resume=True, load_from=str(first.run_dir / "epoch_2"), default_hooks=keep)
    third = trained(tmp_path, 4, resume=True, load_from=str(second.run_dir / "epoch_3"), default_hooks=keep)
    left = [sorted(path.name for path in one.run_dir.glob("epoch_*")) for one in (first, second, third)]
    assert left == [["epoch_3", "epoch_4"], ["epoch_3"], ["epoch_4"]]  # `load_from` finds its checkpoint again
