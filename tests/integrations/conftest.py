"""Starting what a user would, in a process of its own that finds the recipes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import pytest

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "examples" / "integrations"
Start: TypeAlias = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def start(tmp_path: Path) -> Start:
    """Return a function that runs a command in an empty folder, where it must end well."""

    def start(*command: str, **variables: str) -> subprocess.CompletedProcess[str]:
        hidden = ("PYTEST_CURRENT_TEST",)  # with it, a notebook's kernel doesn't show what other processes print
        inherited = {name: value for name, value in os.environ.items() if name not in hidden}
        found = {
            "HOME": str(tmp_path),  # Ray keeps a token there
            "PYTHONPATH": os.pathsep.join(map(str, (RECIPES, *filter(None, [os.environ.get("PYTHONPATH")])))),
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "OMP_NUM_THREADS": "1",
        }
        done = subprocess.run(
            command, cwd=tmp_path, env=inherited | found | variables, capture_output=True, text=True, timeout=900,
            check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
        return done

    return start


def losses_in(work_dir: Path) -> list[float]:
    """Return the losses of the only run in a folder, from its records."""
    (records,) = work_dir.glob("*/metrics.jsonl")
    return [record["loss"] for record in map(json.loads, records.read_text().splitlines()) if "loss" in record]
