"""How the tests start processes that use the simulated accelerator."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture(scope="session")
def start() -> Start:
    """Start Python with the simulator compiled; the arguments are those of its command line."""
    # torch compiles with ninja, which lies beside the Python of an environment.
    built = os.environ.get("TORCH_EXTENSIONS_DIR", str(HERE.parents[1] / "build" / "torch_extensions"))
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    env = os.environ | {"TORCH_EXTENSIONS_DIR": built, "PATH": path}

    def start(*words: object, folder: Path | None = None, **more: str) -> subprocess.Popen[str]:
        command = [sys.executable, *map(str, words)]
        pipe: Any = subprocess.PIPE
        return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, cwd=folder, env=env | more)

    Path(built).mkdir(parents=True, exist_ok=True)
    with open(Path(built, "building"), "w") as building:
        # A process that is killed gives this lock back, but not torch's own, for which the next build would wait.
        fcntl.flock(building, fcntl.LOCK_EX)
        Path(built, "lockstep_sim", "lock").unlink(missing_ok=True)
        finish(start(HERE / "sim.py"))
    return start


def finish(process: subprocess.Popen[str], expected: int = 0) -> str:
    """Wait for the end of a process, and return what it wrote."""
    with process:
        try:
            output, errors = process.communicate(timeout=300)
        finally:
            process.kill()
    assert process.returncode == expected, errors
    return output + errors


def launch(start: Start, folder: Path, size: int, script: str, *words: object) -> list[dict[str, Any]]:
    """Run a script on as many ranks, with a folder as its last argument, and return what each has written there."""
    job = (HERE / script, "--nproc", size, "--log-dir", folder, "--", *words, folder)
    finish(start("-m", "lockstep", "launch", *job))
    return [json.loads((folder / f"rank_{rank}.json").read_text()) for rank in range(size)]
