from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.version import __version__


@pytest.mark.parametrize(
    "words", [[], ["--help"], ["train", "-h"], ["launch", "--help"], ["config", "print", "--help"], ["doctor", "-h"]]
)
def test_help_does_not_import_torch(words):
    code = (
        "import sys\n"
        "from lockstep.cli.main import main\n"
        f"sys.argv = ['lockstep', *{words!r}]\n"
        "try:\n    main()\n"
        "finally:\n    print('torch' in sys.modules, file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "Usage: lockstep" in done.stdout
    assert done.stderr == "False\n"


def test_the_installed_command_and_the_module_are_the_same(lockstep):
    installed = (str(Path(sys.executable).with_name("lockstep")),)
    assert lockstep("--version") == (0, f"{__version__}\n", "")
    assert lockstep("--version", before=installed) == (0, f"{__version__}\n", "")
    assert lockstep("launch", "no_script.py") == (
        1,
        "",
        "error: there is no script `no_script.py`; a module takes -m\n",
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
