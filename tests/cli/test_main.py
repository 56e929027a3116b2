from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.version import __version__


def without_torch(words, folder):
    """Run `lockstep` where torch cannot be imported; return its exit code, output and errors."""
    code = (
        "import sys\n"
        "sys.modules['torch'] = None\n"
        "from lockstep.cli.main import main\n"
        f"sys.argv = ['lockstep', *{words!r}]\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    "words", [["--help"], ["train", "-h"], ["launch", "--help"], ["config", "print", "--help"], ["doctor", "-h"]]
)
def test_help_does_not_import_torch(words, tmp_path):
    code, out, err = without_torch(words, tmp_path)
    assert (code, err) == (0, "")
    assert "Usage: lockstep" in out


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["--version"], 0, __version__),
        (["config", "print", "line.py", "model.width=3"], 0, "width=3"),
        (["config", "diff", "line.py", "line.py"], 0, ""),
        (["report", "."], 0, "report.html"),
        (["doctor"], 1, "lockstep     │"),
        (["train", "none.py", "--nproc", "2"], 1, "there is no config file"),
        (["train", "line.py", "--launcher", "torch"], 1, "`launcher` must be one of"),
        (["train", "line.py", "--nnodes", "2"], 2, "`--rdzv` must be HOST:PORT"),
        (["launch", "none.py", "--nproc", "2"], 1, "the script `none.py` does not exist"),
    ],
)
def test_what_does_not_compute_does_not_import_torch(folder, words, code, says):
    (folder / "metrics.jsonl").write_text('{"mode": "train", "epoch": 1, "iter": 10, "loss": 1.5}\n')
    got, out, err = without_torch(words, folder)
    assert (got, "Traceback" in err) == (code, False)
    assert says in out + err


def test_the_installed_command_and_the_module_are_the_same(lockstep):
    installed = (str(Path(sys.executable).with_name("lockstep")),)
    assert lockstep("--version") == (0, f"{__version__}\n", "")
    assert lockstep("--version", before=installed) == (0, f"{__version__}\n", "")
    assert lockstep("launch", "no_script.py") == (
        1,
        "",
        "error: the script `no_script.py` does not exist. To run a module, use -m\n",
    )


def test_the_doctor_finds_that_ranks_can_meet(lockstep):
    code, out, _ = lockstep("doctor")
    assert code == 0
    assert f"lockstep     │ {__version__}" in out
    assert "gloo" in out
    assert "works (127.0.0.1" in out
    assert "none: lockstep starts its own ranks" in out


def test_the_doctor_tells_of_a_contradictory_environment(lockstep):
    code, out, _ = lockstep("doctor", env={"RANK": "3", "WORLD_SIZE": "2", "LOCAL_RANK": "0"})
    assert code == 0
    assert "contradictory" in out
