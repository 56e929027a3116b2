"""Trainings of 1 to 4 ranks of which random ones are killed at random moments, until the end.

The global batch is kept, so that each must end with the losses and weights of a training that nothing interrupted.
One line is printed for each run.

CYCLES=N: how many trainings. FIRST=N: the first one's number, from which its moments are drawn.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from threading import Event, Thread

import psutil
import pytest
import torch
from tests.faults.test_elastic import PARTS, every_sample_once, kept

from lockstep.checkpoint.drafts import drafts_in, is_owned

RESTARTS, EPOCHS = 8, 8
PATIENCE = 240.0  # seconds until ranks have started, on a busy machine
TOLERANCE = 1e-6  # relative
KINDS = ("start-up", "training", "save", "two")
CONFIG = """
from soak import Indices, Net, Noted, Weights

model = dict(type=Net)
sampler = dict(type="DefaultSampler", shuffle=True, round_up=False)  # no sample is repeated to fill up the last batches
train_dataloader = dict(dataset=dict(type=Indices), global_batch_size=12, sampler=sampler)
train_cfg = dict(max_epochs={epochs})
optim_wrapper = dict(optimizer=dict(type="SGD", lr=0.002, momentum=0.9))
param_scheduler = dict(type="CosineAnnealingLR", T_max={epochs}, convert_to_iter_based=True)
default_hooks = dict(checkpoint=dict(interval=3, by_epoch=False, async_save={async_save}))
custom_hooks = [dict(type=Noted, file="noted.jsonl", seconds={seconds}), dict(type=Weights)]
randomness = dict(seed=3)
visualizer = []
"""
MORE_PARTS = """
from lockstep.model import unwrap_model

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 500), nn.Tanh(), nn.Linear(500, 500), nn.Tanh(), nn.Linear(500, 1))
    def forward(self, inputs, indices):
        return (self.layers(inputs) - torch.sin(9 * inputs[:, :1])).square().mean()

class Weights(Hook):
    main_only = True
    def after_train(self, runner):
        torch.save(unwrap_model(runner.model).state_dict(), "weights.pth")
"""


def start(folder: Path, *, async_save: bool, seconds: float) -> subprocess.Popen[str]:
    """Start a training of up to four ranks, whose iterations take at least so many seconds."""
    (folder / "soak.py").write_text(PARTS + MORE_PARTS)
    (folder / "config.py").write_text(CONFIG.format(epochs=EPOCHS, async_save=async_save, seconds=seconds))
    words = ["train", "config.py", "--work-dir", "work", "--nproc", "1:4", "--max-restarts", str(RESTARTS)]
    return subprocess.Popen(
        [sys.executable, "-m", "lockstep", *words], cwd=folder, env={**os.environ, "OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True,
    )  # fmt: skip


class Killer:
    """Kills random ranks of a job. Each attempt with several ranks loses one or two; the first on one rank, it alone.

    Args:
        job: the launcher.
        folder: where it was started.
        chosen: draws moments and ranks.
    """

    def __init__(self, job: subprocess.Popen[str], folder: Path, chosen: random.Random) -> None:
        self._job, self._folder, self._chosen = job, folder, chosen
        self.killed: list[str] = []  # when
        self._seen: set[int] = set()
        self.is_over = Event()
        self._thread = Thread(target=self._run, daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Kill no more."""
        self.is_over.set()
        self._thread.join()

    def _run(self) -> None:
        size = 4
        while size > 1:
            if not self._until(self._is_begun, PATIENCE):
                return
            time.sleep(0.3)  # the other ranks are started
            size = len(self._ranks())
            self._strike(self._chosen.choice(KINDS))

    def _is_begun(self) -> bool:
        """Return whether there are ranks of an attempt of which none was killed."""
        pids = {rank.pid for rank in self._ranks()}
        is_new = bool(pids) and not pids & self._seen
        self._seen |= pids if is_new else set()
        return is_new

    def _strike(self, kind: str) -> None:
        done = self._lines()
        if kind != "start-up":
            self._until(lambda: self._lines() > done, PATIENCE)
        if kind == "save":
            self._until(self._saves, 3.0)
        else:
            self.is_over.wait(self._chosen.uniform(0.0, 3.0))
        self._kill(done)
        if kind == "two":
            self.is_over.wait(self._chosen.uniform(0.0, 0.5))
            self._kill(done)

    def _kill(self, done: int) -> None:
        ranks = self._ranks()
        if self.is_over.is_set() or not ranks:
            return
        when = "save" if self._saves() else "training" if self._lines() > done else "start-up"
        self._chosen.choice(ranks).kill()
        self.killed.append(when)

    def _ranks(self) -> list[psutil.Process]:
        try:
            found = psutil.Process(self._job.pid).children()
            return [
                one
                for one in found
                if one.status() != psutil.STATUS_ZOMBIE and "lockstep.launch.worker" in one.cmdline()
            ]
        except psutil.NoSuchProcess:
            return []

    def _lines(self) -> int:
        file = self._folder / "noted.jsonl"
        return len(file.read_text().splitlines()) if file.exists() else 0

    def _saves(self) -> bool:
        work = self._folder / "work"
        try:
            return work.exists() and any(is_owned(draft) for draft in drafts_in(work))
        except OSError:  # it was just published
            return False

    def _until(self, condition, seconds: float):
        deadline = time.monotonic() + seconds
        while not (found := condition()) and time.monotonic() < deadline and not self.is_over.is_set():
            time.sleep(0.002)
        return found


def losses_of(lines: list[dict]) -> dict[int, float]:
    """Return the loss of each iteration over all ranks."""
    sums: dict[int, list[float]] = {}
    for line in lines:
        total = sums.setdefault(line["iter"], [0.0, 0.0])
        total[0] += line["loss"] * len(line["indices"])
        total[1] += len(line["indices"])
    return {number: total / count for number, (total, count) in sums.items()}


def ended(folder: Path) -> tuple[dict[int, float], dict[str, torch.Tensor]]:
    return losses_of(kept(folder)), torch.load(folder / "weights.pth", weights_only=True)


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> tuple[dict[int, float], dict[str, torch.Tensor]]:
    """Return the losses and weights of a training that nothing interrupts."""
    folder = tmp_path_factory.mktemp("whole")
    job = start(folder, async_save=False, seconds=0.0)
    _, err = job.communicate(timeout=120)
    assert job.returncode == 0, err
    return ended(folder)


_FIRST = int(os.environ.get("FIRST", "1"))


@pytest.mark.parametrize("number", range(_FIRST, _FIRST + int(os.environ.get("CYCLES", "8"))))
def test_it_ends_as_if_nothing_had_been_killed(tmp_path: Path, number: int, whole) -> None:
    began = time.monotonic()
    job = start(tmp_path, async_save=bool(number % 2), seconds=0.1)
    killer = Killer(job, tmp_path, random.Random(number))
    try:
        _, err = job.communicate(timeout=2 * PATIENCE)
    finally:
        job.kill()
        killer.end()
    assert job.returncode == 0, err
    lines = kept(tmp_path)
    losses, weights = ended(tmp_path)
    of_loss = max(abs(loss - whole[0][number]) / whole[0][number] for number, loss in losses.items())
    of_weights = max(float((weights[key] - right).abs().max() / right.abs().max()) for key, right in whole[1].items())
    all_lines = (tmp_path / "noted.jsonl").read_text().splitlines()
    sizes = {line["attempt"]: line["ranks"] for line in map(json.loads, all_lines)}
    print(
        f"| {number} | {', '.join(killer.killed)} | {' '.join(map(str, sizes.values()))} | {of_loss:.1e} "
        f"| {of_weights:.1e} | {time.monotonic() - began:.0f} |",
        flush=True,
    )
    assert killer.killed
    assert every_sample_once(lines, EPOCHS)
    assert losses.keys() == whole[0].keys()
    assert of_loss < TOLERANCE
    assert of_weights < TOLERANCE
