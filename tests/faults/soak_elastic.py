"""Trainings of 1 to 4 ranks, of which a random one is killed at a random moment, until the end.

CYCLES=N: how many trainings.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path
from threading import Event, Thread

import psutil
import pytest
from tests.faults.test_elastic import EPOCHS, every_sample_once, kept, prepare

RESTARTS = 6


def killing(job: subprocess.Popen[str], folder: Path, chosen: random.Random, killed: list[float], over: Event) -> None:
    """Kill ranks at random moments, as long as the job lives and has restarts.

    None is killed in the iteration in which the last one was: the launcher would blame the training for that.
    """
    began, before = time.monotonic(), -1
    while len(killed) < RESTARTS and not over.wait(chosen.uniform(1.0, 15.0)):
        file = folder / "noted.jsonl"
        done = len(file.read_text().splitlines()) if file.exists() else 0
        if abs(done - before) <= 8:  # two iterations of four ranks
            continue
        before = done
        try:
            ranks = [one for one in psutil.Process(job.pid).children() if "lockstep.launch.worker" in one.cmdline()]
            if ranks:
                chosen.choice(ranks).kill()
                killed.append(time.monotonic() - began)
        except psutil.NoSuchProcess:
            continue


@pytest.mark.parametrize("number", range(int(os.environ.get("CYCLES", "20"))))
def test_it_reaches_the_end(tmp_path: Path, number: int) -> None:
    chosen, killed, over = random.Random(number), list[float](), Event()
    words = prepare(tmp_path, "1:4", RESTARTS, {}, async_save=bool(number % 2), seconds_per_step=0.3)
    job = subprocess.Popen(
        [sys.executable, "-m", "lockstep", *words], cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    killer = Thread(target=killing, args=(job, tmp_path, chosen, killed, over), daemon=True)
    killer.start()
    _, err = job.communicate(timeout=600)
    over.set()
    killer.join()
    assert job.returncode == 0, err
    lines = kept(tmp_path)
    assert every_sample_once(lines)
    assert max(line["epoch"] for line in lines) == EPOCHS - 1
    sizes = {line["attempt"]: line["ranks"] for line in lines}
    print(f"run {number}: killed after {[round(moment, 1) for moment in killed]} s, ranks {list(sizes.values())}")
