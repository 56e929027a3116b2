"""Thirty times: a run is killed inside of a save, and the next one resumes. It takes minutes: `make soak-kills`."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from lockstep.checkpoint import candidates, find_checkpoints
from lockstep.checkpoint.folder import drafts_in

CYCLES, KEEP = int(os.environ.get("CYCLES", "30")), 2

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
    default_hooks=dict(checkpoint=dict(by_epoch=False, interval=2, max_keep_ckpts=2)),
).train()
"""


def test_no_kill_inside_of_a_save_loses_more_than_that_save(tmp_path: Path):
    work_dir, rng = tmp_path / "work", random.Random(0)
    inside = 0
    reached = 0
    for cycle in range(CYCLES):
        with (tmp_path / f"{cycle}.txt").open("w") as log:
            job = subprocess.Popen([sys.executable, "-c", JOB, str(work_dir)], stdout=log, stderr=log, env=os.environ)
            before = {one.directory for one in find_checkpoints([work_dir])}
            deadline = time.monotonic() + 240
            # Once it has saved a checkpoint of its own, or at once in every third cycle, wait for a draft.
            while cycle % 3 and not {one.directory for one in find_checkpoints([work_dir])} - before:
                assert job.poll() is None, (tmp_path / f"{cycle}.txt").read_text()
                assert time.monotonic() < deadline
                time.sleep(0.01)
            while not any(f".{job.pid}." in draft.name for draft in drafts_in(work_dir)):
                assert job.poll() is None, (tmp_path / f"{cycle}.txt").read_text()
                assert time.monotonic() < deadline
            time.sleep(rng.random() * 0.05)
            job.send_signal(signal.SIGKILL)
            job.wait()
        drafts, found = list(drafts_in(work_dir)), find_checkpoints([work_dir])
        inside += bool(drafts)
        assert len(drafts) <= 1
        assert len(found) <= KEEP + 1
        path, fault = next(candidates(work_dir), (None, None))
        assert fault is None
        if path is not None:
            at = int(path.name.removeprefix("iter_"))
            assert at >= reached
            reached = at
    print(f"{CYCLES} kills, {inside} of them inside of a save or of a removal; the last checkpoint is at {reached}")
    assert inside >= CYCLES // 3
    assert reached >= CYCLES
