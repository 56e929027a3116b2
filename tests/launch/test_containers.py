"""Containers that have the name of their host, as with its network, but number their processes by themselves."""

from __future__ import annotations

import os
import pty
import signal
import time
from pathlib import Path

import psutil
import pytest

from lockstep.checkpoint.drafts import FolderDraft
from lockstep.testing.pool import free_port

from .jobs import LOOPBACK, PYTHON, Job, require, run, run_at_once

IN_CONTAINER = ("unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child", "--mount-proc")

pytestmark = [pytest.mark.launchers, require("unshare", able_to=(*IN_CONTAINER, "true"))]

LATE = """
import time, torch
from lockstep.dist import all_reduce, get_rank, init_dist
init_dist("pytorch", backend="gloo")
if get_rank() == 0:
    time.sleep(4)  # others look for it meanwhile
data = torch.ones(1)
all_reduce(data)
print(data.item())
"""

CLEARING = """
import sys
from pathlib import Path
from lockstep.checkpoint import remove_dead_drafts
print(remove_dead_drafts([Path(sys.argv[1])]))
"""

LEAVING = """
import psutil, subprocess, sys, time
from contextlib import suppress
left = int(subprocess.run(["sh", "-c", "sleep 0.2 & echo $!"], stdout=subprocess.PIPE).stdout)
with suppress(psutil.NoSuchProcess):  # it is gone
    while psutil.Process(left).status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.02)
time.sleep(0.5)
print("zombies:", [one.pid for one in psutil.process_iter() if one.status() == psutil.STATUS_ZOMBIE])
sys.exit(7)
"""


def before_others_in_path(folder: Path) -> dict[str, str]:
    return {"PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])}


def test_a_rank_in_another_container_is_late_and_not_gone() -> None:
    port = free_port()
    env = {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    commands = [
        ("env", f"RANK={rank}", f"LOCAL_RANK={rank}", *before, PYTHON, "-c", LATE)
        for rank, before in enumerate(((), IN_CONTAINER))
    ]
    for ended in run_at_once(*commands, env=env):
        assert (ended.code, ended.out) == (0, "2.0\n"), ended.err


def test_a_checkpoint_that_another_container_writes_is_left_alone(tmp_path: Path) -> None:
    draft = FolderDraft(tmp_path / "epoch_1")
    for before in ((), IN_CONTAINER):
        ended = run([*before, PYTHON, "-c", CLEARING, str(tmp_path)])
        assert (ended.code, ended.out) == (0, "[]\n"), ended.err
    assert draft.folder.is_dir()


def test_a_signal_ends_the_first_process_of_a_container_while_it_starts(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("import pathlib, time\npathlib.Path('loading').touch()\ntime.sleep(3)\n")
    (tmp_path / "script.py").touch()
    command = (*IN_CONTAINER, PYTHON, "-m", "lockstep", "launch", "script.py")
    with Job(command, env=before_others_in_path(tmp_path), cwd=tmp_path) as job:
        while not (tmp_path / "loading").exists():
            assert job.running()
            time.sleep(0.02)
        psutil.Process(job.pid).children()[0].terminate()
        assert job.end().code == 128 + signal.SIGTERM


def test_the_first_process_of_a_container_passes_on_that_its_terminal_is_gone(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import pathlib, time\npathlib.Path('ready').touch()\ntime.sleep(30)\n")
    master, terminal = pty.openpty()
    with_terminal = ("sh", "-c", f'exec setsid --ctty "$@" < {os.ttyname(terminal)}', "sh")
    command = (*IN_CONTAINER, *with_terminal, PYTHON, "-m", "lockstep", "launch", "script.py")
    with Job(command, cwd=tmp_path) as job:
        while not (tmp_path / "ready").exists():
            assert job.running()
            time.sleep(0.02)
        os.close(terminal)
        os.close(master)
        assert job.end().code == 128 + signal.SIGHUP


def test_the_first_process_of_a_container_waits_for_what_others_have_left(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(LEAVING)
    ended = run([*IN_CONTAINER, PYTHON, "-m", "lockstep", "launch", "script.py"], cwd=tmp_path)
    assert (ended.code, ended.out) == (7, "zombies: []\n"), ended.err
