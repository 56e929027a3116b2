"""Disks that are really full: small ones in memory, which root may mount."""

from __future__ import annotations

import errno
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import wait
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lockstep.checkpoint import find_last_checkpoint, load_state, save_state, verify
from lockstep.checkpoint.files import writing
from lockstep.checkpoint.search import candidates
from lockstep.dist import all_gather_object, barrier, get_rank, get_world_size
from lockstep.errors import ConfigError
from lockstep.hooks import Hook
from lockstep.location import make_folder
from lockstep.runner import Runner
from lockstep.testing import run_ranks

from ..runs import Losses

MIB = 2**20
PAGE = 4096  # bytes that a file on such a disk takes at a time
X = torch.randn(64, 4, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 8 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    lacks = None
    if os.name != "posix" or os.geteuid() != 0:
        lacks = "a disk can be mounted by root alone"
    elif shutil.which("mount") is None:
        lacks = "mount is not installed"
    else:
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=8m", "lockstep-test", folder],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        lacks = done.stderr if done.returncode else None
    if lacks is not None:
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(lacks)
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


class Fill(Hook):
    """Leaves no space on a disk before the first checkpoint is saved."""

    def __init__(self, disk: Path) -> None:
        self._disk = disk

    def before_save_checkpoint(self, runner: Any, checkpoint: dict[str, Any]) -> None:
        fill(self._disk, 0)


def free(disk: Path) -> int:
    return shutil.disk_usage(disk).free


def fill(disk: Path, left: int) -> None:
    """Let so many bytes be free, on rank 0 for all."""
    barrier()
    if get_rank() == 0:
        filler = disk / "filler"
        filler.unlink(missing_ok=True)
        with filler.open("wb") as file:
            file.write(bytes(free(disk) - left))
        assert free(disk) == left
    barrier()


def listed(folder: Path) -> list[str]:
    """Return all that is in a folder, hidden or not, as seen by every rank when all are done."""
    barrier()
    found = sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))
    barrier()
    return found


def save(directory: Path, state: dict[str, Any], work_dir: Path) -> OSError | None:
    try:
        save_state(directory, state, {"n": 2}, last_of=work_dir)
    except OSError as error:
        return error
    return None


def value(directory: Path) -> float:
    """Return the one number in a tensor of a checkpoint."""
    (number,) = set(load_state(directory, {"model": {"w7": torch.zeros(5120)}})["model"]["w7"].tolist())
    assert isinstance(number, float)
    return number


def save_with_so_much_space(disk: Path, replaces: bool) -> None:
    """Save with one page more each time: so the disk is full at each write in turn."""
    work_dir, name = disk / "work", "epoch_1" if replaces else "epoch_2"
    run = work_dir / "20260101_000000"
    size = 8 * 5120 * 4  # bytes of the tensors
    state = {"model": {f"w{number}": torch.full((5120,), 1.0) for number in range(8)}}
    save_state(run / "epoch_1", state, {"n": 1}, last_of=work_dir)
    for tensor in state["model"].values():
        tensor.fill_(2.0)
    before, said = listed(work_dir), []
    for pages in range(size // PAGE - 1, size // PAGE + 20):
        fill(disk, pages * PAGE)
        failure = save(run / name, state, work_dir)
        if failure is None:
            break
        assert failure.errno == errno.ENOSPC
        said.append(str(failure))
        assert f"{pages * PAGE:,} bytes are free on the disk of {disk}" in said[-1]
        assert "Remove checkpoints (`lockstep checkpoints prune WORK_DIR --keep N`)" in said[-1]
        # Nothing is left of it, and what was there is what it was.
        assert listed(work_dir) == before, said
        assert free(disk) == pages * PAGE
        assert find_last_checkpoint(work_dir) == run / "epoch_1"
        assert [fault for _, fault in candidates(work_dir) if fault] == []
        verify(run / "epoch_1")
        assert value(run / "epoch_1") == 1.0
    else:
        raise AssertionError("the checkpoint was never saved")
    assert all_gather_object(said) == [said] * get_world_size()
    for words in said:
        assert re.search(rf"{name} could not be written: rank \d: No space left on device", words), words
    assert find_last_checkpoint(work_dir) == run / name
    assert value(run / name) == 2.0
    verify(run / name)


@pytest.mark.parametrize("replaces", [False, True])
def test_a_disk_that_is_full_at_any_page_of_a_save(replaces: bool, disk: Path):
    run_ranks(2, save_with_so_much_space, disk, replaces)


def test_a_disk_that_is_read_only_says_what_to_do(disk: Path):
    (disk / "logs").mkdir()
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    with pytest.raises(ConfigError, match=r"must be a folder that can be written to, but .* The disk is mounted read-"):
        make_folder(disk / "logs", "work_dir")
    with pytest.raises(ConfigError, match=r"cannot be created: .*Read-only.* The disk is mounted read-only, or has"):
        train(disk / "work")
    failure = save(disk / "state", {"model": {}}, disk)
    assert failure is not None
    assert "The disk is mounted read-only, or has become so after an error" in str(failure)


class Net(nn.Module):
    """With its moments, 1.5 MiB."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 20000), nn.ReLU(), nn.Linear(20000, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers(x)
        return (out - 1).square().mean()


def train(work_dir: Path, **changes: Any) -> tuple[Any, Runner]:
    """Train until the end or until a checkpoint can't be written; return the losses, with the error as `error`."""
    losses: Any = Losses()
    torch.manual_seed(3)
    checkpoint = {"by_epoch": False, "interval": 1, **changes.pop("checkpoint", {})}
    runner = Runner(
        Net(), work_dir,
        train_dataloader=DataLoader(TensorDataset(X), batch_size=8 // get_world_size(), shuffle=True),
        optim_wrapper={"optimizer": {"type": "AdamW", "lr": 0.01}},
        train_cfg={"max_epochs": 1}, default_hooks={"checkpoint": checkpoint}, custom_hooks=[losses],
        randomness={"seed": 5}, visualizer=[], **changes,
    )  # fmt: skip
    try:
        runner.train()
    except OSError as error:
        losses.error = error
    return losses, runner


def numbers(folder: Path) -> list[int]:
    """Return the iterations of the checkpoints in a run's folder, each of which must be whole."""
    barrier()
    found = sorted(path for path in folder.iterdir() if path.name.startswith("iter_"))
    for path in found:
        verify(path)
    assert not list(folder.glob(".*"))
    barrier()
    return sorted(int(path.name.removeprefix("iter_")) for path in found)


def train_until_it_is_full(disk: Path, elsewhere: Path, async_save: bool) -> None:
    whole, _ = train(elsewhere / "whole")
    work_dir, options = disk / "work", {"checkpoint": {"async_save": async_save}}
    losses, runner = train(work_dir, **options)
    done = numbers(runner.run_dir)
    last = max(done)
    assert done == list(range(1, last + 1))
    assert 2 <= last < 8
    words = str(losses.error)
    assert losses.error.errno == errno.ENOSPC
    assert all_gather_object(words) == [words] * 2
    assert re.search(rf"iter_{last + 1} could not be written: rank \d: No space left on device", words)
    assert find_last_checkpoint(work_dir) == runner.run_dir / f"iter_{last}"
    barrier()
    if get_rank() == 0:
        for number in done[:-1]:
            shutil.rmtree(runner.run_dir / f"iter_{number}")
    barrier()
    # With space again it goes on from there, and keeps as few as there is space for.
    rest, runner = train(work_dir, resume=True, checkpoint={"max_keep_ckpts": 2, **options["checkpoint"]})
    assert rest.by_iter == {number: loss for number, loss in whole.by_iter.items() if number >= last}
    assert numbers(runner.run_dir) == [7, 8]


def train_on(disk: Path, elsewhere: Path, async_save: bool) -> None:
    whole, _ = train(elsewhere / "whole")
    losses, runner = train(disk / "work", checkpoint={"on_save_error": "warn", "async_save": async_save})
    assert losses.by_iter == whole.by_iter
    assert "iter_8 could not be written" in str(losses.error)  # the last one, when nothing is left to go on with
    done = numbers(runner.run_dir)
    assert done == list(range(1, len(done) + 1))
    assert 2 <= len(done) < 8
    assert find_last_checkpoint(disk / "work") == runner.run_dir / f"iter_{len(done)}"
    logged = (runner.run_dir / "log.txt").read_text()
    assert logged.count("Training goes on without it, because of on_save_error='warn'") == 8 - len(done)


@pytest.mark.parametrize("async_save", [False, True])
@pytest.mark.parametrize("body", [train_until_it_is_full, train_on])
def test_a_training_on_a_disk_that_gets_full(body: Any, async_save: bool, disk: Path, tmp_path: Path):
    run_ranks(2, body, disk, tmp_path, async_save)


def test_no_error_of_a_disk_is_lost_that_takes_a_file_while_more_is_written(tmp_path: Path, monkeypatch: Any):
    """An error of a disk is told once, to the call that waits for it: here the second one of four."""
    calls, fsync = count(), os.fsync

    def failing(descriptor: int) -> None:
        if next(calls) == 1:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", failing)
    with pytest.raises(OSError, match="Input/output error"), writing(tmp_path / "file", 0) as file:  # noqa: PT012
        for _ in range(3):
            wait([file._flush])
            file.write(bytes(33 * MIB))


def test_the_disk_that_is_full_is_named_where_it_is_not_that_of_the_checkpoints(disk: Path, tmp_path: Path):
    hooks = {"checkpoint": {"out_dir": str(tmp_path / "elsewhere")}}
    runner = Runner(
        nn.Linear(4, 1), disk / "work", loss=nn.MSELoss(), train_dataloader=DataLoader(TensorDataset(X, X[:, :1]), 32),
        train_cfg={"max_epochs": 1}, default_hooks=hooks, custom_hooks=[Fill(disk)], visualizer=[],
    )  # fmt: skip
    with pytest.raises(OSError, match=rf"0 bytes are free on the disk of {re.escape(str(disk))}/work"):
        runner.train()
