"""Fifty times: a run is killed inside of a save, and the next one resumes. It takes minutes: `make soak-kills`.

Half of the runs save while the training goes on. The process is stopped before it is killed, and goes on unless the
disk shows that it is inside of a save.
"""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

from lockstep.checkpoint import find_checkpoints, verify
from lockstep.checkpoint.drafts import drafts_in
from lockstep.checkpoint.search import candidates

CYCLES, KEEP = int(os.environ.get("CYCLES", "50")), 2

JOB = """
import sys
import torch
from torch import nn
from torch.utils.data import TensorDataset
from lockstep.runner import Runner

x = torch.randn(64, 512)
Runner(
    nn.Sequential(nn.Linear(512, 2048), nn.Linear(2048, 512)), sys.argv[1], loss=nn.MSELoss(), resume=True,
    train_dataloader=dict(dataset=TensorDataset(x, x), batch_size=8), train_cfg=dict(max_iters=100_000),
    optim_wrapper=dict(optimizer=dict(type="AdamW", lr=0.001)), randomness=dict(seed=1),
    default_hooks=dict(
        checkpoint=dict(by_epoch=False, interval=2, max_keep_ckpts=2, async_save=sys.argv[2] == "async"),
    ),
).train()
"""


def test_no_kill_inside_of_a_save_loses_more_than_that_save(tmp_path: Path):
    work_dir, rng = tmp_path / "work", random.Random(0)
    reached = resumed = most = 0
    for cycle in range(CYCLES):
        log = tmp_path / f"{cycle}.txt"
        how = "async" if cycle % 2 else "sync"
        with log.open("w") as file:
            words = [sys.executable, "-c", JOB, str(work_dir), how]
            job = subprocess.Popen(words, stdout=file, stderr=file, env=os.environ)
            kill_inside_of_a_save(job, work_dir, log, rng)
        came_from = re.search(r"iter_(\d+)", log.read_text())
        resumed += came_from is not None and int(came_from[1]) == reached
        drafts, found = list(drafts_in(work_dir)), find_checkpoints([work_dir])
        assert len(drafts) == 1  # those of the killed runs before it are gone
        assert len(found) <= KEEP + 1
        most = max(most, len(found))
        path, fault = next(candidates(work_dir), (None, None))
        assert fault is None
        if path is not None:
            verify(path)
            at = int(path.name.removeprefix("iter_"))
            assert at >= reached
            reached = at
    print(
        f"{CYCLES} kills inside of a save, half of them asynchronous; {resumed} runs resumed where the one before had "
        f"saved last; at most {most} checkpoints; the last one is at iteration {reached}"
    )
    assert resumed >= CYCLES - 1  # the first one begins
    assert reached >= CYCLES


def kill_inside_of_a_save(job: subprocess.Popen[bytes], work_dir: Path, log: Path, rng: random.Random) -> None:
    """Kill a job while there is a draft of its own in which it is writing, once it has saved something."""
    before = set(find_checkpoints([work_dir]))
    deadline = time.monotonic() + 240
    while True:
        assert job.poll() is None, log.read_text()
        assert time.monotonic() < deadline
        if not is_saving(job, work_dir):
            continue
        time.sleep(rng.random() * 0.03)
        job.send_signal(signal.SIGSTOP)
        while Path(f"/proc/{job.pid}/stat").read_text().rpartition(") ")[2][0] != "T":
            pass
        if is_saving(job, work_dir) and set(find_checkpoints([work_dir])) - before:
            break
        job.send_signal(signal.SIGCONT)
    job.send_signal(signal.SIGKILL)
    job.wait()


def is_saving(job: subprocess.Popen[bytes], work_dir: Path) -> bool:
    own = (draft for draft in drafts_in(work_dir) if f".{job.pid}." in draft.name)
    return any(not (draft / "manifest.json").exists() for draft in own)
