"""A checkpoint is never lost: a kill after any single step of publishing leaves one to resume from."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import pytest
import torch

from lockstep.checkpoint import drafts as drafts_module
from lockstep.checkpoint import (
    find_last_checkpoint,
    load_state,
    remove_dead_drafts,
    save_state,
    verify,
)
from lockstep.checkpoint import saving as saving_module
from lockstep.checkpoint.drafts import FolderDraft, drafts_in, is_owned
from lockstep.checkpoint.search import candidates, pointing
from lockstep.dist import get_rank
from lockstep.errors import ConfigError
from lockstep.testing import ranks

# Does the same again and again in new processes: each counts the calls that change the disk, and dies after the K-th.
DYING = """
import os, signal, sys
from itertools import count
from pathlib import Path
import torch
from torch.distributed.checkpoint import default_planner
from lockstep.checkpoint import remove, save_state

folder, case = Path(sys.argv[1]), sys.argv[2]
CHANGES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir"}

def state(value):
    return {"model": {"w": torch.full((3000,), float(value))}}

def work(work_dir, last):
    calls = 0

    def happened():
        nonlocal calls
        calls += 1
        if calls > last:
            os.kill(os.getpid(), signal.SIGKILL)

    def hook(event, arguments):
        # An audit event comes before its call: to die here is to die after the call before.
        if event in CHANGES or (event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR)):
            happened()

    def fsync(descriptor, fsync=os.fsync):
        fsync(descriptor)
        happened()

    run = work_dir / "20260101_000000"
    save_state(run / "epoch_1", state(1), {"n": 1}, last_of=work_dir)
    save_state(run / "epoch_2", state(2), {"n": 2}, last_of=work_dir)
    sys.addaudithook(hook)
    os.fsync = fsync
    if case == "new":
        save_state(run / "epoch_3", state(3), {"n": 3}, last_of=work_dir)
    elif case == "replaced":
        save_state(run / "epoch_2", state(3), {"n": 3}, last_of=work_dir)
    else:
        remove(run / "epoch_1")

for last in count():
    child = os.fork()
    if child == 0:
        work(folder / str(last), last)
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status != -signal.SIGKILL:
        print(last)
        sys.exit(status)
"""


def values(directory: Path) -> set[float]:
    return set(load_state(directory, {"model": {"w": torch.zeros(3000)}})["model"]["w"].tolist())


@pytest.mark.parametrize(("case", "least"), [("new", 14), ("replaced", 17), ("removed", 3)])
def test_a_kill_after_any_step_leaves_a_checkpoint(case: str, least: int, tmp_path: Path):
    done = subprocess.run(
        [sys.executable, "-c", DYING, str(tmp_path), case], env=os.environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    number = int(done.stdout)
    assert number >= least
    outcomes = set()
    for after in range(number):
        work_dir = tmp_path / str(after)
        run = work_dir / "20260101_000000"
        found = list(candidates(work_dir))
        assert [fault for _, fault in found if fault] == [], after
        directory = found[0][0]
        verify(directory)
        assert len(values(directory)) == 1, after
        outcomes |= values(directory)
        assert find_last_checkpoint(work_dir) in (run / "epoch_2", run / "epoch_3")
        drafts = list(drafts_in(work_dir))
        assert len(drafts) <= 1
        assert remove_dead_drafts([work_dir]) == drafts
        assert {len(list(one.iterdir())) for one in run.iterdir()} == {2}, after
        # What is left is in nobody's way.
        save_state(run / "epoch_2", {"model": {"w": torch.full((3000,), 4.0)}}, {}, last_of=work_dir)
        assert values(run / "epoch_2") == {4.0}
        assert len(list((run / "epoch_2").iterdir())) == 2
    assert outcomes == ({2.0} if case == "removed" else {2.0, 3.0})


def test_a_save_has_not_failed_where_an_old_file_cannot_be_removed(tmp_path: Path):
    directory = tmp_path / "epoch_1"
    save_state(directory, {"model": {"w": torch.full((3000,), 1.0)}}, {}, last_of=tmp_path)
    (directory / "rank_1.safetensors").mkdir()  # which no unlink removes
    save_state(directory, {"model": {"w": torch.full((3000,), 2.0)}}, {}, last_of=tmp_path)
    verify(directory)
    assert values(directory) == {2.0}
    assert find_last_checkpoint(tmp_path) == directory


@pytest.mark.parametrize(("at", "value"), [(1, 1.0), (2, 1.0), (3, 2.0)])
def test_a_save_that_fails_while_it_is_published_leaves_none_of_its_files(at: int, value: float, tmp_path: Path):
    directory, calls = tmp_path / "epoch_1", []
    save_state(directory, {"model": {"w": torch.full((3000,), 1.0)}}, {})

    def fails(folder: Path) -> None:
        calls.append(folder)
        if len(calls) == at:
            raise OSError(errno.EIO, "Input/output error")

    with patch.object(drafts_module, "sync_folder", fails), pytest.raises(OSError, match="Input/output error"):
        save_state(directory, {"model": {"w": torch.full((3000,), 2.0)}}, {})
    assert values(directory) == {value}  # the third call comes when the new manifest has its place
    assert len(list(directory.iterdir())) == 2
    assert list(tmp_path.iterdir()) == [directory]


def test_the_folder_above_need_not_be_readable():
    """As `/home` may be closed to all users, who save in folders of their own."""
    me = os.geteuid()
    with TemporaryDirectory() as top:
        home = Path(top, "home", "user")
        home.mkdir(parents=True)
        Path(top).chmod(0o711)
        home.parent.chmod(0o311)
        if me == 0:  # who may read everything
            os.chown(home, 65534, -1)
            os.seteuid(65534)
        try:
            with pytest.raises(PermissionError):
                os.listdir(home.parent)
            save_state(home / "one", {"model": {"w": torch.ones(2)}}, {})
            verify(home / "one")
        finally:
            os.seteuid(me)
            home.parent.chmod(0o711)


def test_a_draft_belongs_to_the_process_that_made_it(tmp_path: Path):
    mine = FolderDraft(tmp_path / "run" / "epoch_1").folder
    assert is_owned(mine)
    dead = mine.with_name(mine.name.replace(f".{os.getpid()}.", ".4194303."))
    again = mine.with_name(mine.name.replace(f".{os.getpid()}.", f".{os.getpid()}.1"))  # the number was used again
    elsewhere = mine.with_name(f"{mine.name}x")  # on another host, and written to just now
    abandoned = mine.with_name(f"{mine.name}y")
    for path in (dead, again, elsewhere, abandoned):
        path.mkdir()
    (mine.parent / "mine.draft").mkdir()  # not one of ours
    os.utime(abandoned, (1, 1))
    assert sorted(remove_dead_drafts([tmp_path, tmp_path / "nowhere"])) == sorted([dead, again, abandoned])
    assert {path.name for path in mine.parent.iterdir()} == {mine.name, elsewhere.name, "mine.draft"}


def test_a_draft_of_another_machine_of_the_same_name_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with monkeypatch.context() as there:
        there.setattr("lockstep.topology.pid_namespace.machine", lambda: "the other machine's")
        made = FolderDraft(tmp_path / "epoch_1").folder
    made = made.rename(made.with_name(made.name.replace(f".{os.getpid()}.", ".4194303.")))  # no process here has it
    assert remove_dead_drafts([tmp_path]) == []
    assert made.is_dir()


@ranks(2)
def test_a_disk_that_fills_up_is_said_on_all_ranks_and_nothing_is_left(tmp_path: Path):
    class Full(saving_module._Checksums):
        def update(self, band: memoryview) -> None:
            if get_rank() == 1:
                raise OSError(errno.ENOSPC, "No space left on device")

    state = {f"w{rank}": torch.zeros(1000) for rank in range(4)}
    with patch.object(saving_module, "_Checksums", Full), pytest.raises(OSError) as caught:  # noqa: PT011
        save_state(tmp_path / "run" / "epoch_1", state, {}, last_of=tmp_path)
    assert caught.value.errno == errno.ENOSPC
    assert "epoch_1 could not be written: rank 1: No space left on device" in str(caught.value)
    assert not list((tmp_path / "run").iterdir())
    save_state(tmp_path / "run" / "epoch_1", state, {}, last_of=tmp_path)
    assert find_last_checkpoint(tmp_path) == tmp_path / "run" / "epoch_1"


@pytest.mark.parametrize("number", range(20))
def test_a_damaged_pointer_is_noticed(number: int, tmp_path: Path):
    for name in ("epoch_1", "epoch_3", "epoch_11"):
        save_state(tmp_path / "run" / name, {"w": torch.zeros(1)}, {})
    with pointing(tmp_path, tmp_path / "run" / "epoch_11"):
        pass
    pointer = tmp_path / "last_checkpoint"
    good = pointer.read_bytes()
    place = number * len(good) // 20
    line = good.partition(b"\n")[0] + b"\n"
    damaged = [line, good[:place], bytes([*good[:place], good[place] ^ 1 << number % 8, *good[place + 1 :]])]
    for data in damaged:
        pointer.write_bytes(data)
        with pytest.raises(ConfigError, match=r"last_checkpoint must hold the path of a checkpoint and its digest"):
            find_last_checkpoint(tmp_path)
        (path, fault), *others = candidates(tmp_path)
        assert path == pointer
        assert "is damaged" in str(fault)
        assert [path.name for path, _ in others] == ["epoch_11", "epoch_3", "epoch_1"]
    pointer.write_bytes(good + bytes(4096))
    with pytest.raises(ConfigError, match=r"at most 2,048 bytes, but has [\d,]+\. It names no checkpoint\. Remove it$"):
        find_last_checkpoint(tmp_path)
