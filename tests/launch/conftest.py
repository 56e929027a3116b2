from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest


class Scripts:
    """A folder of scripts, and `lockstep launch` in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.jobs: list[subprocess.Popen[str]] = []

    def write(self, text: str, name: str = "script.py") -> str:
        (self.folder / name).write_text(dedent(text))
        return name

    def start(self, *words: str, before: tuple[str, ...] = (), env: dict[str, str] | None = None, **options):
        """Start a job; `before` are words in front of the command."""
        job = subprocess.Popen(
            [*before, sys.executable, "-m", "lockstep", "launch", *words],
            cwd=self.folder,
            env={name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"} | (env or {}),
            stdout=options.pop("stdout", subprocess.PIPE),
            stderr=options.pop("stderr", subprocess.PIPE),
            text=True,
            **options,
        )
        self.jobs.append(job)
        return job

    def run(self, *words: str, **options):
        """Run a job to its end; return its exit code, output and errors."""
        return end_of(self.start(*words, **options))


def as_rank(folder, text, *args, local_rank=1, log_dir=None, module=False, env=None):
    """Run a script in a folder as one rank, as the agent would, and return how it ended."""
    script = folder / "script.py"
    script.write_text(dedent(text))
    target = ["-m", "script"] if module else [str(script)]
    variables = {"RANK": "3", "LOCAL_RANK": str(local_rank), "TORCHELASTIC_ERROR_FILE": str(folder / "error.json")}
    return subprocess.run(
        [sys.executable, "-m", "lockstep.launch.worker", str(os.getpid()), str(log_dir or ""), *target, *args],
        env=os.environ | variables | (env or {}),
        cwd=folder,
        capture_output=True,
        text=True,
    )


def end_of(job, timeout: float = 90) -> tuple[int, str, str]:
    out, err = job.communicate(timeout=timeout)
    return job.returncode, out, err


@pytest.fixture
def scripts(tmp_path):
    made = Scripts(tmp_path)
    yield made
    for job in made.jobs:
        job.kill()
        job.wait()
        for stream in (job.stdout, job.stderr):
            if stream is not None:
                stream.close()


def pytest_itemcollected(item: pytest.Item) -> None:
    item.add_marker("jobs")
