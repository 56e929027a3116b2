"""Containers that have the name of their host, as with its network, but number their processes by themselves."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from lockstep.checkpoint.drafts import FolderDraft

from .jobs import LOOPBACK, PYTHON, require, run, run_at_once

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


def test_a_rank_in_another_container_is_late_and_not_gone() -> None:
    with socket.create_server((LOOPBACK, 0)) as server:
        port = server.getsockname()[1]
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
