"""The example in Python alone; the command line's tests run the same training from its config."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.jobs

SCRIPT = Path(__file__).parents[2] / "examples" / "digits" / "train.py"


def test_the_script_reads_digits(tmp_path: Path):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "error", str(SCRIPT)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    accuracy = re.search(r"^result  accuracy ([\d.]+) %$", done.stdout, re.MULTILINE)
    assert float(accuracy[1]) >= 97
    run_dir = Path(tmp_path, re.search(r"^run     (.+)$", done.stdout, re.MULTILINE)[1])
    assert {"epoch_10", "log.txt", "metrics.jsonl"} <= {path.name for path in run_dir.iterdir()}
