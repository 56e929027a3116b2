"""Running `job.py`: on ranks that the test starts itself, so that all of them can be seen to the end, and launched."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from lockstep.testing.pool import free_port

from .forking import PATIENCE, forking

ROOT = Path(__file__).parents[2]
# Folders of torch's compiler, and of Python's multiprocessing where a signal has ended a rank with workers.
_NOT_OURS = ("torchinductor_", "pymp-")


class Raised(NamedTuple):
    """The error of a rank, and how long after the fault it was raised."""

    kind: str
    text: str
    seconds: float


@dataclass
class Outcome:
    """What became of a job.

    Attributes:
        codes: the exit codes: of the ranks, or of the launcher alone; None for a rank that had to be killed.
        raised: the errors of the ranks that raised one.
        seconds: from the fault to the end.
        pids: the ranks' processes.
        said: what was written to stderr, of each rank or by the launcher.
    """

    codes: list[int | None]
    raised: dict[int, Raised]
    seconds: float
    pids: dict[int, int]
    said: list[str] = field(default_factory=list)

    @property
    def message(self) -> str:
        """What the launcher says of the failure."""
        return self.said[0].partition("\nerror: ")[2]


def alone(
    size: int, folder: Path, *words: str, failing: int = 1, environment: Mapping[str, str] | None = None
) -> Outcome:
    """Run a job without a launcher.

    Args:
        size: number of ranks.
        folder: where they run.
        *words: arguments of `job.py`.
        failing: the rank that fails, and may not end: it is killed after the others have ended.
        environment: more variables.
    """
    shared = {
        **_environment(folder, failing),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        **(environment or {}),
    }
    shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    variables = [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(size)]
    codes, ended = forking().run(folder, variables, failing, words)
    said = [(folder / f"output_{rank}").read_text() for rank in range(size)]
    return outcome_of(folder, size, codes, ended, said)


def launched(
    nproc: int, folder: Path, *words: str, failing: int = 1, environment: Mapping[str, str] | None = None
) -> Outcome:
    """Run a job by `lockstep launch`, and check that nothing of it is left."""
    temporary = folder / "tmp"
    temporary.mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "lockstep", "launch", "--nproc", str(nproc), "-m", "tests.faults.job", *words],
        cwd=folder, env={**_environment(folder, failing), "TMPDIR": str(temporary), **(environment or {})},
        capture_output=True, text=True, timeout=PATIENCE,
    )  # fmt: skip
    outcome = outcome_of(folder, nproc, [done.returncode], time.time(), [done.stderr])
    sessions = set(outcome.pids.values())
    left: list[object] = [path for path in temporary.iterdir() if not path.name.startswith(_NOT_OURS)]
    left += [one for one in psutil.process_iter(["status", "cmdline"]) if _is_left(one, sessions)]
    left += [path for pid in sessions for path in Path("/dev/shm").glob(f"torch_{pid}_*")]
    assert not left, left
    return outcome


def _environment(folder: Path, failing: int) -> dict[str, str]:
    paths = (str(ROOT), os.environ.get("PYTHONPATH", ""))
    own = {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "NOTES": str(folder),
        "FAILING": str(failing),
        "OMP_NUM_THREADS": "1",
    }
    return {**os.environ, **own}


def start_rank(
    folder: Path, before: Sequence[str], failing: int, variables: Mapping[str, str], words: Sequence[str]
) -> subprocess.Popen[bytes]:
    """Start one rank by a command that begins with the words `before`."""
    with (folder / f"output_{variables['RANK']}").open("wb") as output:
        return subprocess.Popen(
            [*before, sys.executable, "-m", "tests.faults.job", *words],
            cwd=folder, env={**_environment(folder, failing), **variables}, stdout=output, stderr=output,
        )  # fmt: skip


def outcome_of(folder: Path, size: int, codes: list[int | None], ended: float, said: list[str]) -> Outcome:
    """Return what became of a job, by the notes of its ranks."""
    notes = {rank: _notes(folder / f"rank_{rank}") for rank in range(size)}
    faults = [[line["at"] for line in lines if line["what"] == "fault"] for lines in notes.values()]
    assert any(faults), said
    fault = max(min(moments) for moments in faults if moments)  # all ranks take part in calls that differ
    raised = {
        rank: Raised(line["kind"], line["text"], line["at"] - fault)
        for rank, lines in notes.items()
        for line in lines
        if line["what"] == "raised"
    }
    return Outcome(codes, raised, ended - fault, {rank: lines[0]["pid"] for rank, lines in notes.items()}, said)


def _notes(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def _is_left(process: psutil.Process, sessions: set[int]) -> bool:
    try:
        return process.info["status"] != psutil.STATUS_ZOMBIE and os.getsid(process.pid) in sessions
    except ProcessLookupError:
        return False
