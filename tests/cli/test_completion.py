"""Completion in a shell, as the shell asks for it: quickly, so without torch."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from lockstep.registry import STRATEGIES
from lockstep.topology import LauncherName

CODE = """
import sys
sys.modules["torch"] = None
from lockstep.cli.main import app
sys.argv = ["lockstep"]
app(prog_name="lockstep")
"""


def complete(folder, *words):
    """Return what bash would offer for the last word."""
    done = subprocess.run(
        [sys.executable, "-c", CODE],
        cwd=folder,
        env=os.environ
        | {
            "_LOCKSTEP_COMPLETE": "complete_bash",
            "COMP_WORDS": " ".join(["lockstep", *words]),
            "COMP_CWORD": str(len(words)),
        },
        capture_output=True,
        text=True,
    )
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["tr"], ["train"]),
        (["config", ""], ["print", "check"]),
        (["train", "--st"], ["--strategy"]),
        (["train", "--strategy", ""], ["single", "ddp", "fsdp", "deepspeed", "colossalai"]),
        (["train", "c.py", "--strategy", "f"], ["fsdp"]),
        (["test", "c.py", "--launcher", "s"], ["slurm"]),
        (["train", "c.py", "--cfg-options", "odd", "--strategy", "f"], ["fsdp"]),
        (["launch", "script.py", "--np"], ["--nproc"]),
    ],
)
def test_words_are_completed_without_torch(tmp_path, words, offered):
    assert complete(tmp_path, *words) == offered


def test_every_name_is_offered(tmp_path):
    names = filter(str.islower, STRATEGIES._known_names())
    assert sorted(complete(tmp_path, "train", "--strategy", "")) == sorted(names)
    assert sorted(complete(tmp_path, "train", "--launcher", "")) == sorted(LauncherName.__args__)
