"""Launched jobs in which one rank fails, again and again, in random order and after random delays: who is named first.

RUNS=N: how many jobs of each case. SEED=N: of what is drawn. BUSY=N: processes that compute beside the ranks.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from . import cases
from .cases import Case
from .table import Table
from .test_blame import check

RUNS, SEED, BUSY = (int(os.environ.get(name, usual)) for name, usual in (("RUNS", 1), ("SEED", 0), ("BUSY", 0)))
DRAWN = random.Random(SEED)
ONCE = [
    *((case, size) for case in (*cases.IN_A_COLLECTIVE, *cases.IN_CALLS) for size in (2, 4)),
    *((case, 2) for case in cases.IN_A_SCRIPT_WITHOUT_LOCKSTEP),
    *((case, 4) for case in (*cases.IN_BACKWARD, *cases.IN_A_TRAINING)),
]
JOBS = DRAWN.sample(ONCE * RUNS, len(ONCE) * RUNS)


@pytest.fixture(autouse=True, scope="module")
def busy_machine() -> Iterator[None]:
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(BUSY)]
    yield
    for other in others:
        other.kill()
        other.wait()


@pytest.mark.parametrize(
    ("case", "nproc", "delay"),
    [(case, size, DRAWN.uniform(0.0, 0.5)) for case, size in JOBS],
    ids=[f"{number}-{case.id}-{size}" for number, (case, size) in enumerate(JOBS)],
)
def test_the_culprit_is_named_first(case: Case, nproc: int, delay: float, tmp_path: Path, table: Table) -> None:
    check(case, nproc, tmp_path, table, delay=delay)
