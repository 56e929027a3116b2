"""How the tests start processes that use the simulated accelerator."""

from __future__ import annotations

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

    def start(*words: object, **more: str) -> subprocess.Popen[str]:
        command = [sys.executable, *map(str, words)]
        pipe: Any = subprocess.PIPE
        return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=env | more)

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
