"""Whatever ends a job, no rank of it is left, and nothing in shared memory; if its launcher ends it, nothing at all."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from lockstep.launch.elastic import _SECONDS_OF_A_PRESS

BEGIN = """
import os, signal, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
"""
READY = """
print("ready", os.getpid(), flush=True)
time.sleep(1000)
"""
DEAF = """
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.SIG_IGN)
"""
# Its workers ignore one SIGTERM, as those of the Runner do, and share their batches by files.
LOADER = """
import torch
from torch.utils.data import DataLoader
from lockstep.runner.data_workers import end_workers_at_exit, prepare_workers
torch.multiprocessing.set_sharing_strategy("file_system")
loader = DataLoader(torch.ones(1000, 1000), batch_size=10, num_workers=2)
prepare_workers(loader, ["SIGINT", "SIGTERM", "SIGUSR1"])
end_workers_at_exit()
batches = iter(loader)
kept = [next(batches) for _ in range(5)]
"""


class Job:
    """Two ranks under the launcher, and all their processes once they are ready. A context manager."""

    def __init__(self, folder: Path, script: str, *words: str) -> None:
        (folder / "script.py").write_text(script)
        self.temporary = folder / "tmp"
        self.temporary.mkdir()
        self.errors = folder / "errors"
        with self.errors.open("w") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "lockstep", "launch", "script.py", "--nproc", "2", *words],
                cwd=folder,
                env=os.environ | {"TMPDIR": str(self.temporary), "OMP_NUM_THREADS": "1"},
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        self.ranks: list[psutil.Process] = []
        self.others: list[psutil.Process] = []

    def __enter__(self) -> Job:
        for _ in range(2):
            word, pid = self.process.stdout.readline().split()
            assert word == "ready"
            self.ranks.append(psutil.Process(int(pid)))
        self.ranks.sort(key=lambda rank: rank.environ()["RANK"])  # they may be ready in any order
        self.others = [child for rank in self.ranks for child in rank.children(recursive=True)]
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()
        for process in self.others:  # where the test has failed
            if process.is_running():
                process.kill()

    def said(self, words: str) -> bool:
        """Wait until the launcher says something."""
        return eventually(lambda: words in self.errors.read_text())

    def check_nothing_left(self) -> None:
        """Check that the ranks and what they started are no more, nor any files."""
        assert len(self.others) >= 2
        self.check_ended([*self.ranks, *self.others])
        assert eventually(lambda: list(self.temporary.iterdir()) == []), list(self.temporary.iterdir())

    def check_ended(self, processes: Sequence[psutil.Process]) -> None:
        """Check that these are no more, nor any file by which processes of the job shared tensors."""
        for process in processes:
            assert eventually(lambda process=process: has_ended(process)), process.cmdline()
        assert eventually(lambda: not self._new_shared()), self._new_shared()

    def _new_shared(self) -> list[Path]:
        pids = {str(process.pid) for process in [*self.ranks, *self.others]}
        return [path for path in Path("/dev/shm").glob("torch_*") if path.name.split("_")[1] in pids]


def eventually(condition, seconds: float = 30) -> bool:
    deadline = time.monotonic() + seconds
    while not (result := condition()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return result


def has_ended(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process with its parent")
@pytest.mark.parametrize("also", ["", DEAF, LOADER], ids=["", "deaf", "loader"])
def test_the_launcher_is_killed(tmp_path, also):
    with Job(tmp_path, BEGIN + also + READY) as job:
        # A data loader's workers look for their rank every five seconds; another process of a rank's may go on.
        workers = [process for process in job.others if "lockstep.launch.worker" in process.cmdline()]
        assert len(workers) == (4 if also == LOADER else 0)
        job.process.kill()
        job.check_ended([*job.ranks, *workers])


def test_a_rank_is_killed_that_has_a_data_loader(tmp_path):
    with Job(tmp_path, BEGIN + LOADER + READY) as job:
        job.ranks[1].kill()
        assert job.process.wait(timeout=60) == 137
        assert "error: rank 1 was ended by SIGKILL" in job.errors.read_text()
        job.check_nothing_left()


def test_a_rank_succeeds_and_leaves_a_process(tmp_path):
    with Job(tmp_path, BEGIN + READY.replace("1000", "3")) as job:
        assert job.process.wait(timeout=60) == 0
        job.check_nothing_left()


def test_a_process_that_has_left_the_session_is_left_alone(tmp_path):
    script = BEGIN.replace("])", "], start_new_session=True)") + READY.replace("1000", "3")
    with Job(tmp_path, script) as job:
        assert job.process.wait(timeout=60) == 0
        assert [process.is_running() for process in job.others] == [True, True]


def test_ranks_that_are_stopped_end_at_ctrl_c(tmp_path):
    with Job(tmp_path, BEGIN + READY, "--grace-seconds", "600") as job:
        for rank in job.ranks:
            rank.suspend()
        job.process.send_signal(signal.SIGINT)
        assert job.process.wait(timeout=60) == 130
        job.check_nothing_left()


def test_ranks_that_are_deaf_end_at_the_second_ctrl_c(tmp_path):
    with Job(tmp_path, BEGIN + DEAF + READY, "--grace-seconds", "600") as job:
        job.process.send_signal(signal.SIGINT)
        assert job.said("Ctrl-C once more")
        time.sleep(_SECONDS_OF_A_PRESS)
        job.process.send_signal(signal.SIGINT)
        assert job.process.wait(timeout=20) == 130  # 0.1 s here
        job.check_nothing_left()


def test_ranks_that_are_deaf_end_after_their_grace(tmp_path):
    with Job(tmp_path, BEGIN + DEAF + READY, "--grace-seconds", "1") as job:
        job.process.send_signal(signal.SIGTERM)
        assert job.process.wait(timeout=60) == -signal.SIGTERM
        job.check_nothing_left()
