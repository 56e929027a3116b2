"""On one node lockstep is not reachable from outside: every socket of a job that listens is on loopback."""

from __future__ import annotations

import time
from pathlib import Path

import psutil
import pytest

from .jobs import LOOPBACK, PYTHON, TRAIN_DIGITS, TWO_STEPS, Job, check_training

pytestmark = pytest.mark.launchers


def listening(job: Job) -> set[tuple[int, str]]:
    """Return process and address of all sockets of a job that listen at this moment."""
    found = set()
    for process in job.processes():
        try:
            sockets = process.net_connections("inet")
        except psutil.NoSuchProcess:
            continue
        found |= {(process.pid, sock.laddr.ip) for sock in sockets if sock.status == psutil.CONN_LISTEN}
    return found


def seen_listening(*jobs: Job) -> set[tuple[int, str]]:
    """Return the same of jobs' whole lives."""
    seen: set[tuple[int, str]] = set()
    while any(job.running() for job in jobs):
        seen = seen.union(*map(listening, jobs))
        time.sleep(0.1)
    return seen


def test_lockstep_train_on_two_ranks_listens_on_loopback_alone(tmp_path: Path) -> None:
    with Job([*TRAIN_DIGITS, "--nproc", "2", "--work-dir", str(tmp_path)]) as job:
        seen = seen_listening(job)
        ended = job.end()
    assert ended.code == 0, ended.err
    assert {address for _, address in seen} == {LOOPBACK}
    assert len({process for process, _ in seen}) == 3  # the store, and gloo in each rank


def test_two_jobs_of_lockstep_launch_train_apart_and_listen_on_loopback_alone() -> None:
    command = [PYTHON, "-m", "lockstep", "launch", TWO_STEPS, "--nproc", "2"]
    with Job(command) as first, Job(command) as second:
        seen = seen_listening(first, second)
        jobs = [first.end(), second.end()]
    for ended in jobs:
        check_training(ended, "pytorch", [(0, 2, 0), (1, 2, 0)])
    assert {address for _, address in seen} == {LOOPBACK}
    assert len({process for process, _ in seen}) == 6
