"""Starting jobs as a user's shell would, reading what their ranks report, and leaving no process behind."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

PYTHON = sys.executable
TWO_STEPS = str(Path(__file__).with_name("two_steps.py"))
DIGITS_CONFIG = str(Path(__file__).parents[2] / "examples" / "digits" / "config.py")
TRAIN_DIGITS = (PYTHON, "-m", "lockstep", "train", DIGITS_CONFIG, "--cfg-options", "train_cfg.max_epochs=1")
LOOPBACK = "127.0.0.1"

# Waiting for ranks that never come takes minutes; whoever ends within this did not wait.
PATIENCE_SECONDS = 180

_OF_LAUNCHERS = ("SLURM", "OMPI_", "PMI", "TORCHELASTIC_", "MASTER_", "RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_")


def require(*programs: str, root: bool = False, able_to: Sequence[str] = ()) -> pytest.MarkDecorator:
    """Return the mark that skips tests visibly where they cannot run. With CI=true they run, and fail for what lacks.

    Args:
        programs: what must be installed.
        root: only root can do it.
        able_to: a command that must succeed.
    """
    missing = [f"`{program}`" for program in programs if shutil.which(program) is None]
    if root and os.geteuid() != 0:
        missing.append("to be root")
    if able_to and not missing and subprocess.run(able_to, capture_output=True).returncode:
        missing.append(f"to be allowed `{' '.join(able_to)}`")
    is_ci = os.environ.get("CI") == "true"
    return pytest.mark.skipif(bool(missing) and not is_ci, reason=f"needs {', '.join(missing)}")


def clean_environment() -> dict[str, str]:
    """Return this process's environment without what any launcher may have put there."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_OF_LAUNCHERS)}
    # mpirun gives its ranks a terminal.
    return kept | {"OMP_NUM_THREADS": "1", "TERM": "dumb"}


@dataclass(frozen=True)
class Ended:
    """What became of a job."""

    code: int
    out: str
    err: str

    def __add__(self, other: Ended) -> Ended:
        """Return what the two parts of a job on two hosts are together."""
        return Ended(self.code or other.code, self.out + other.out, self.err + other.err)

    @property
    def ranks(self) -> list[dict[str, Any]]:
        """What the ranks of `two_steps.py` reported, in their order."""
        lines = [line for line in self.out.splitlines() if line.startswith("{")]
        return sorted((json.loads(line) for line in lines), key=lambda report: report["rank"])


class Job:
    """A running command. A context manager, at whose end no process of it is left."""

    def __init__(
        self, command: Sequence[str], *, env: Mapping[str, str] | None = None, cwd: Path | None = None
    ) -> None:
        self._process = subprocess.Popen(
            command,
            env=clean_environment() | dict(env or {}),
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.pid = self._process.pid

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            for process in self.processes():
                process.kill()
        self._process.communicate()

    def processes(self) -> list[psutil.Process]:
        """Return the command's process and all that descend from it."""
        try:
            process = psutil.Process(self.pid)
            return [process, *process.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def running(self) -> bool:
        """Return whether the command has not ended."""
        return self._process.poll() is None

    def end(self) -> Ended:
        """Wait for the end."""
        out, err = self._process.communicate(timeout=PATIENCE_SECONDS)
        return Ended(self._process.returncode, out, err)


def run(command: Sequence[str], *, env: Mapping[str, str] | None = None, cwd: Path | None = None) -> Ended:
    """Run a command to its end."""
    with Job(command, env=env, cwd=cwd) as job:
        return job.end()


def run_at_once(*commands: Sequence[str], env: Mapping[str, str] | None = None) -> list[Ended]:
    """Start commands at the same time, and run all of them to their end."""
    if not commands:
        return []
    with Job(commands[0], env=env) as job:
        others = run_at_once(*commands[1:], env=env)
        return [job.end(), *others]


def check_training(ended: Ended, launcher: str, places: Sequence[tuple[int, int, int]]) -> None:
    """Check that all ranks trained together.

    Args:
        ended: the job that ran `two_steps.py`.
        launcher: what the ranks should have taken for their launcher.
        places: by rank: local rank, local size, node rank.
    """
    assert ended.code == 0, ended.err
    ranks = ended.ranks
    assert [report["rank"] for report in ranks] == list(range(len(places)))
    assert {report["launcher"] for report in ranks} == {launcher}
    assert {report["world_size"] for report in ranks} == {len(places)}
    assert {report["num_nodes"] for report in ranks} == {len({node for _, _, node in places})}
    assert [(report["local_rank"], report["local_size"], report["node_rank"]) for report in ranks] == list(places)
    assert all(report["parameters"] == ranks[0]["parameters"] for report in ranks)


def check_digits(ended: Ended, work_dir: Path) -> None:
    """Check that `lockstep train` ran one epoch, as one job with one folder, and told the result once."""
    assert ended.code == 0, ended.err
    assert ended.out.count("result  accuracy") == 1, ended.out
    (run_dir,) = (path for path in work_dir.iterdir() if path.is_dir())
    assert str(run_dir) in ended.out
