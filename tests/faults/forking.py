"""Ranks that are forked from a process that has imported torch: a job begins at once, not after seconds.

As a program, this file is that process: for each line of its input it runs `job.py` on several ranks.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

PATIENCE = 180.0  # seconds until a job counts as hanging; on a busy machine, starting takes most of it
_SECONDS_FOR_FAILING = 1.5  # after the others have ended: it may raise as they do, or end slowly


class Forking:
    """The process that forks; it ends with this one."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.forking"], cwd=Path(__file__).parents[2],
            env={**os.environ, "OMP_NUM_THREADS": "1"}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        atexit.register(self._process.communicate)

    def run(
        self, folder: Path, variables: Sequence[dict[str, str]], failing: int, words: Sequence[str]
    ) -> tuple[list[int | None], float]:
        """Run a job, and return the exit codes of the ranks, and when all had ended but the one that fails.

        Args:
            folder: where the ranks run; what rank r writes is in `output_r` there.
            variables: the environment of each rank.
            failing: the rank that fails, and may not end: it is killed after the others have ended.
            words: arguments of `job.py`.
        """
        request = {"folder": str(folder), "variables": variables, "failing": failing, "words": words}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        codes, ended = json.loads(self._process.stdout.readline())
        return codes, ended


@cache
def forking() -> Forking:
    """Return the process that forks."""
    return Forking()


def _run_job(folder: str, variables: Sequence[dict[str, str]], failing: int, words: Sequence[str]) -> Any:
    pids = [os.fork() or _run_rank(folder, own, words) for own in variables]
    codes: dict[int, int] = {}
    others = set(range(len(pids))) - {failing}
    _await(pids, codes, others, PATIENCE)
    ended = time.time()
    _await(pids, codes, {failing}, _SECONDS_FOR_FAILING)
    known = [codes.get(rank) for rank in range(len(pids))]
    for pid in pids:
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)  # also what it has started: without a launcher nobody else does
    _await(pids, codes, set(range(len(pids))), PATIENCE)
    return known, ended


def _await(pids: Sequence[int], codes: dict[int, int], ranks: set[int], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not ranks <= codes.keys() and time.monotonic() < deadline:
        for rank, pid in enumerate(pids):
            if rank not in codes:
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    codes[rank] = os.waitstatus_to_exitcode(status)
        time.sleep(0.005)


def _run_rank(folder: str, variables: dict[str, str], words: Sequence[str]) -> NoReturn:
    """Do what a new interpreter would do for `python -m tests.faults.job`."""
    os.setsid()
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(folder)
    output = os.open(f"output_{variables['RANK']}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    code = 0
    try:
        from tests.faults.job import main

        main(*words)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException as error:
        traceback.print_exc()
        sys.last_value, code = error, 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _serve() -> None:
    import tests.faults.job  # noqa: F401
    import torch.distributed.checkpoint
    import torch.distributed.fsdp  # noqa: F401

    for line in sys.stdin:
        print(json.dumps(_run_job(**json.loads(line))), flush=True)


if __name__ == "__main__":
    _serve()
