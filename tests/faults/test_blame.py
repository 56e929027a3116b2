"""One rank fails while the others wait for it: the launcher names that rank first, and leaves nothing behind."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

SCRIPT = """
import atexit, os, signal, subprocess, sys, time
import torch
from lockstep.dist import all_reduce, barrier, get_rank, init_dist
init_dist("pytorch", timeout={timeout})
barrier()
subprocess.Popen(["sleep", "1000"])  # in each rank, as a data loader's worker
if get_rank() == 1:
    {fault}
all_reduce(torch.ones(100_000))
"""
PLAIN_SCRIPT = """
import atexit, os, signal, subprocess, sys, time
import torch, torch.distributed as dist
from datetime import timedelta
dist.init_process_group("gloo", timeout=timedelta(seconds={timeout}))
dist.barrier()
if dist.get_rank() == 1:
    {fault}
dist.all_reduce(torch.ones(100_000))
"""
LOOP = "while True: pass"
DEAF = "signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(1000)"
SLOWLY = "atexit.register(time.sleep, 1); raise ValueError('boom')"


@dataclass(frozen=True)
class Case:
    """What rank 1 does, and what the launcher says of it."""

    fault: str
    says: str
    code: int = 1
    then: str = ""
    timeout: float = 60

    @property
    def is_missed(self) -> bool:
        """Whether the launcher learns of it only by the others, rather than perhaps before them."""
        return self.timeout < 60 or "code 0" in self.says


CASES = {
    "raises": Case("raise ValueError('boom')", "raised ValueError (pid {pid})", then="ValueError: boom"),
    "raises and ends slowly": Case(SLOWLY, "raised ValueError (pid {pid})", then="ValueError: boom"),
    "leaves its group while others call": Case(
        "from lockstep.dist import destroy_dist; destroy_dist()",
        "raised CollectiveMismatchError (pid {pid})",
        then="rank 1: has ended, after barrier() at script.py:6",
    ),
    "exits with 3": Case("sys.exit(3)", "exited with code 3 (pid {pid})", code=3),
    "exits with 0": Case("sys.exit(0)", "exited with code 1 (pid {pid})"),  # lockstep tells at the end of the process
    "os._exit(0)": Case("os._exit(0)", "exited with code 0 (pid {pid}) while other ranks went on"),
    "aborts": Case("os.abort()", "was ended by SIGABRT (pid {pid})", code=134),
    "SIGKILL": Case(
        "os.kill(os.getpid(), signal.SIGKILL)",
        "was ended by SIGKILL (pid {pid})",
        code=137,
        then="somebody else did" if Path("/proc/vmstat").exists() else "run out of memory",
    ),
    "SIGTERM": Case("os.kill(os.getpid(), signal.SIGTERM)", "was ended by SIGTERM (pid {pid})", code=143),
    "SIGSTOP": Case(
        "os.kill(os.getpid(), signal.SIGSTOP)", "was stopped (SIGSTOP, pid {pid})", then="script.py", timeout=2
    ),
    "endless loop": Case(LOOP, "was still running (pid {pid}, computing)", then='script.py", line ', timeout=2),
    "deaf to SIGTERM": Case(
        DEAF, "was still running (pid {pid}, waiting)", then="so the launcher killed it", timeout=2
    ),
}


def run_job(folder: Path, script: str, nproc: int) -> tuple[int, str, dict[int, int]]:
    """Run a script on ranks; return the exit code, what the launcher said, and the ranks' processes."""
    (folder / "script.py").write_text(PIDS + script)
    temporary = folder / "tmp"
    temporary.mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "lockstep", "launch", "script.py", "--nproc", str(nproc)],
        cwd=folder,
        env=os.environ | {"TMPDIR": str(temporary), "PIDS": str(folder), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=40,
    )
    assert list(temporary.iterdir()) == []
    pids = {rank: int((folder / f"pid_{rank}").read_text()) for rank in range(nproc)}
    sessions = set(pids.values())
    assert [one for one in psutil.process_iter(["status", "cmdline"]) if is_left(one, sessions)] == []
    assert [path.name for pid in sessions for path in Path("/dev/shm").glob(f"torch_{pid}_*")] == []
    return done.returncode, done.stderr, pids


PIDS = "import os; open(f'{os.environ[\"PIDS\"]}/pid_{os.environ[\"RANK\"]}', 'w').write(str(os.getpid()))"


def is_left(process: psutil.Process, sessions: set[int]) -> bool:
    try:
        return process.info["status"] != psutil.STATUS_ZOMBIE and os.getsid(process.pid) in sessions
    except ProcessLookupError:
        return False


def check(case: Case, folder: Path, script: str, nproc: int) -> str:
    code, err, pids = run_job(folder, script.format(fault=case.fault, timeout=case.timeout), nproc)
    message = err.partition("\nerror: ")[2]
    assert message.startswith(f"rank 1 {case.says.format(pid=pids[1])}"), err
    assert case.then in message
    assert code == case.code
    return message


@pytest.mark.parametrize("nproc", [2, 4])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_culprit_is_named_first(tmp_path, case, nproc):
    message = check(case, tmp_path, SCRIPT, nproc)
    if case.is_missed:
        assert "After it: rank " in message
        assert "script.py:10" in message  # where the others waited


@pytest.mark.parametrize("name", ["raises and ends slowly", "os._exit(0)", "SIGKILL", "SIGSTOP", "endless loop"])
def test_the_culprit_is_named_in_a_script_without_lockstep(tmp_path, name):
    check(CASES[name], tmp_path, PLAIN_SCRIPT, 2)


@pytest.mark.parametrize("meanwhile", [DEAF, "os.kill(os.getpid(), signal.SIGSTOP)"], ids=["deaf", "stopped"])
def test_a_rank_that_does_not_end_is_not_blamed_for_the_failure_of_another(tmp_path, meanwhile):
    script = SCRIPT.replace("if get_rank() == 1:", f"if get_rank() == 2:\n    {meanwhile}\nif get_rank() == 1:")
    script = script.replace("{fault}", "time.sleep(1); {fault}")
    message = check(CASES["raises"], tmp_path, script, 3)
    assert ("rank 2 was killed by the launcher" in message) == (meanwhile == DEAF)
    assert ("rank 2 was stopped (SIGSTOP)" in message) == (meanwhile != DEAF)
