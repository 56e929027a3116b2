"""A kill at any single system call of a save, each in its turn, leaves a checkpoint to resume from."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lockstep.checkpoint import find_last_checkpoint, load_state, remove_dead_drafts, save_state, verify
from lockstep.checkpoint.drafts import drafts_in
from lockstep.checkpoint.search import candidates

# Does the same again and again in forked processes, each with an own work_dir: first to the end, and then killed by
# strace as it enters its first, second, third ... system call on files. What it enters is no more done.
TRACED = r"""
import json, os, signal, subprocess, sys, time
from contextlib import suppress
from pathlib import Path
import torch
from lockstep.checkpoint import remove, save_state

folder, case = Path(sys.argv[1]), sys.argv[2]
CALLS = "%file,%desc"

def state(value):
    return {"model": {"w": torch.full((3000,), float(value)), "b": torch.full((7,), float(value))}}

def prepare(work_dir):
    run = work_dir / "20260101_000000"
    if case != "first":
        save_state(run / "epoch_1", state(1), {"n": 1}, last_of=work_dir)
        save_state(run / "epoch_2", state(2), {"n": 2}, last_of=work_dir)
    else:
        work_dir.mkdir()
    return run

def work(run):
    if case == "removed":
        remove(run / "epoch_1")
    else:
        save_state(run / ("epoch_2" if case == "replaced" else "epoch_3"), state(3), {"n": 3}, last_of=run.parent)

def traced(number, *options):
    run, log = prepare(folder / str(number)), folder / f"{number}.log"
    child = os.fork()
    if child == 0:
        try:
            # It is traced as soon as the log shows a call that the work does not make.
            while signal.SIGUSR1 not in signal.sigpending():
                with suppress(OSError):
                    os.getxattr("marker", "user.marker")
                time.sleep(0.002)
            work(run)
        finally:
            os._exit(0)
    words = ["strace", "-qq", "-o", log, "-e", f"trace={CALLS}", "-p", str(child), *options]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as strace:
        while not log.exists() or "marker" not in log.read_text():
            if strace.poll() is not None:
                sys.exit(strace.stderr.read())
            time.sleep(0.001)
        os.kill(child, signal.SIGUSR1)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    lines = [line.partition("(") for line in log.read_text().splitlines() if "marker" not in line]
    return status, [name for name, _, _ in lines if name.isidentifier()]

prepare(folder / "warm")
work(folder / "warm" / "20260101_000000")
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
names = traced("whole")[1]
assert "getxattr" not in names
for index, name in enumerate(names):
    status, seen = traced(index, "-e", f"inject={name}:signal=SIGKILL:when={names[: index + 1].count(name)}")
    assert (status, seen) == (-signal.SIGKILL, names[: index + 1]), (index, status, seen[-3:])
print(json.dumps(names))
"""


def values(directory: Path) -> set[float]:
    """Return the numbers in a checkpoint, of which each state has only one."""
    template = {"model": {"w": torch.zeros(3000), "b": torch.zeros(7)}}
    return {number for tensor in load_state(directory, template)["model"].values() for number in tensor.tolist()}


@pytest.mark.parametrize(
    ("case", "changes"),
    [
        ("first", {"mkdir": 3, "write": 6, "fsync": 7, "rename": 2}),  # one in vain, one for the run
        ("new", {"mkdir": 1, "write": 6, "fsync": 7, "rename": 2}),
        ("replaced", {"mkdir": 1, "write": 6, "fsync": 7, "rename": 3, "unlink": 1, "rmdir": 1}),
        ("removed", {"rename": 1, "unlinkat": 2, "rmdir": 1}),
    ],
)
def test_a_kill_at_any_system_call_leaves_a_checkpoint(case: str, changes: dict[str, int], tmp_path: Path):
    if shutil.which("strace") is None:
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)("strace is not installed")
    done = subprocess.run(
        [sys.executable, "-c", TRACED, str(tmp_path), case], env=os.environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    names = json.loads(done.stdout)
    print(f"{case}: {len(names)} kills, one at each of {names}")
    outcomes = []
    for index in range(len(names)):
        work_dir = tmp_path / str(index)
        run = work_dir / "20260101_000000"
        found = list(candidates(work_dir))
        assert [fault for _, fault in found if fault] == [], index
        for directory, _ in found:
            verify(directory)
            assert len(values(directory)) == 1, index
        outcomes.append(values(found[0][0]).pop() if found else None)
        # The pointer leads to a whole checkpoint as soon as there is one.
        pointed = find_last_checkpoint(work_dir)
        assert (pointed is not None) == (work_dir / "last_checkpoint").exists()
        assert pointed is not None or case == "first"
        drafts = list(drafts_in(work_dir))
        assert len(drafts) <= 1
        assert remove_dead_drafts([work_dir]) == drafts
        # What is left is in nobody's way.
        save_state(
            run / "epoch_3", {"model": {"w": torch.full((3000,), 4.0), "b": torch.full((7,), 4.0)}}, {}, work_dir
        )
        assert values(run / "epoch_3") == {4.0}
    # All calls before that which makes the new checkpoint visible leave the old one, all after it the new one.
    old, new = {"first": (None, 3.0), "removed": (2.0, 2.0)}.get(case, (2.0, 3.0))
    count = outcomes.count(old)
    assert outcomes == ([old] * count + [new] * (len(names) - count))
    assert set(outcomes) == {old, new}
    assert names[count - 1] == "rename" or case == "removed"
    assert {name: names.count(name) for name in changes} == changes
