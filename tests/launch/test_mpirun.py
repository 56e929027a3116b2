"""Under Open MPI's mpirun."""

from __future__ import annotations

from pathlib import Path

import pytest

from .jobs import LOOPBACK, PYTHON, TRAIN_DIGITS, TWO_STEPS, check_digits, check_training, require, run, run_at_once

pytestmark = [pytest.mark.launchers, require("mpirun")]

ON_LOOPBACK = (
    "--mca",
    "btl",
    "self,vader,tcp",
    "--mca",
    "btl_tcp_if_include",
    "lo",
    "--mca",
    "oob_tcp_if_include",
    "lo",
)
MPIRUN = ("mpirun", "--allow-run-as-root", "--oversubscribe", *ON_LOOPBACK, "-n", "2")


def test_two_jobs_at_once_train_apart_and_listen_on_loopback_alone() -> None:
    jobs = run_at_once((*MPIRUN, PYTHON, TWO_STEPS), (*MPIRUN, PYTHON, TWO_STEPS))
    for ended in jobs:
        check_training(ended, "mpi", [(0, 2, 0), (1, 2, 0)])
        assert [report["listening"] for report in ended.ranks] == [[LOOPBACK], [LOOPBACK]]


def test_lockstep_train_joins_the_ranks_it_finds(tmp_path: Path) -> None:
    ended = run([*MPIRUN, *TRAIN_DIGITS, "--work-dir", str(tmp_path)])
    check_digits(ended, tmp_path)
    assert "joining the ranks found (mpi): 2" in ended.err


def test_a_contradiction_ends_the_job_at_once() -> None:
    ended = run([*MPIRUN, "-x", "WORLD_SIZE=4", PYTHON, TWO_STEPS])
    assert ended.code == 1
    assert "WORLD_SIZE must be 2 for launcher 'mpi', as OMPI_COMM_WORLD_SIZE says, but is 4 (rank" in ended.err
