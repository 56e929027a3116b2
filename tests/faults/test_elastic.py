"""A training whose ranks are killed goes on with those that are left, from what it has saved, and skips no sample."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

SAMPLES, EPOCHS = 50, 3
CONFIG = """
from parts import Indices, KilledAt, Net, Noted

model = dict(type=Net)
sampler = dict(type="DefaultSampler", shuffle=True, round_up=False)  # no sample is repeated to fill up the last batches
train_dataloader = dict(dataset=dict(type=Indices), batch_size=2, sampler=sampler)
train_cfg = dict(max_epochs={epochs})
optim_wrapper = dict(optimizer=dict(type="SGD", lr=0.01))
default_hooks = dict(checkpoint=dict(interval=4, by_epoch=False, async_save={async_save}))
custom_hooks = [dict(type=Noted, file="noted.jsonl", seconds={seconds}), dict(type=KilledAt, moments={moments})]
randomness = dict(seed=3)
visualizer = []
"""
PARTS = """
import json, os, signal, time
import torch
from torch import nn
from torch.utils.data import Dataset
from lockstep.hooks import Hook

class Indices(Dataset):
    def __len__(self):
        return 50
    def __getitem__(self, index):
        return torch.full((4,), float(index)) / 50, index

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 1)
    def forward(self, inputs, indices):
        return (self.linear(inputs) - 1).square().mean()

class Noted(Hook):
    def __init__(self, file, seconds):
        self.file, self.seconds = file, seconds
    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        time.sleep(self.seconds)
        own = data_batch[1].tolist() if runner.train_loop.samples else []
        attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
        line = dict(attempt=attempt, ranks=runner.world_size, iter=runner.iter, epoch=runner.epoch, indices=own)
        line["loss"] = float(outputs["loss"])
        with open(self.file, "a") as file:
            file.write(json.dumps(line) + "\\n")

class KilledAt(Hook):
    def __init__(self, moments):
        self.moments = moments
    def before_train_iter(self, runner, batch_idx, data_batch=None):
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        if self.moments.get(attempt) == [runner.rank, runner.iter]:
            os.kill(os.getpid(), signal.SIGKILL)
"""


def prepare(
    folder: Path,
    nproc: str,
    restarts: int,
    moments: dict[str, list[int]],
    async_save: bool = False,
    seconds_per_step: float = 0.0,
    epochs: int = EPOCHS,
) -> list[str]:
    """Write a config, and return the words of the command that trains it."""
    (folder / "parts.py").write_text(PARTS)
    (folder / "config.py").write_text(
        CONFIG.format(epochs=epochs, moments=moments, async_save=async_save, seconds=seconds_per_step)
    )
    return ["train", "config.py", "--work-dir", "work", "--nproc", nproc, "--max-restarts", str(restarts)]


def train(folder: Path, *options, **more) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "lockstep", *prepare(folder, *options, **more)],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=150,
    )


def kept(folder: Path) -> list[dict]:
    """Return the iterations that the trained model has made: not those after the checkpoint of a later attempt."""
    lines = [json.loads(line) for line in (folder / "noted.jsonl").read_text().splitlines()]
    begun = {}
    for line in lines:
        begun[line["attempt"]] = min(line["iter"], begun.get(line["attempt"], line["iter"]))
    return [
        line
        for line in lines
        if all(line["iter"] < first for attempt, first in begun.items() if attempt > line["attempt"])
    ]


def every_sample_once(lines: list[dict], epochs: int = EPOCHS) -> bool:
    seen = Counter((line["epoch"], index) for line in lines for index in line["indices"])
    return seen == Counter({(epoch, index): 1 for epoch in range(epochs) for index in range(SAMPLES)})


def test_it_goes_on_with_the_ranks_that_are_left(tmp_path: Path) -> None:
    ended = train(tmp_path, "1:3", 2, {"0": [1, 6], "1": [0, 14]})
    assert ended.returncode == 0, ended.stderr
    assert "rank 1 was ended by SIGKILL" in ended.stderr
    assert "Starting again with 2 ranks, as many as are left (restart 1 of 2)." in ended.stderr
    assert "Starting again with 1 rank, as many as are left (restart 2 of 2)." in ended.stderr
    lines = kept(tmp_path)
    assert {(line["attempt"], line["ranks"]) for line in lines} == {(0, 3), (1, 2), (2, 1)}
    assert every_sample_once(lines)


def test_ranks_that_are_lost_in_the_same_iteration_are_left_out_one_after_the_other(tmp_path: Path) -> None:
    ended = train(tmp_path, "1:3", 3, {"0": [1, 6], "1": [1, 6]})
    assert ended.returncode == 0, ended.stderr
    assert "Starting again with 1 rank, as many as are left (restart 2 of 3)." in ended.stderr
    lines = kept(tmp_path)
    assert {(line["attempt"], line["ranks"]) for line in lines} == {(0, 3), (2, 1)}
    assert every_sample_once(lines)


def test_a_fixed_number_of_ranks_is_started_again(tmp_path: Path) -> None:
    ended = train(tmp_path, "2", 1, {"0": [1, 10]}, async_save=True)
    assert ended.returncode == 0, ended.stderr
    assert "Starting all ranks again (restart 1 of 1)." in ended.stderr
    lines = kept(tmp_path)
    assert {(line["attempt"], line["ranks"]) for line in lines} == {(0, 2), (1, 2)}
    assert every_sample_once(lines)


def test_what_an_earlier_job_has_saved_is_not_taken_up(tmp_path: Path) -> None:
    assert train(tmp_path, "1", 1, {}).returncode == 0
    (tmp_path / "noted.jsonl").unlink()
    ended = train(tmp_path, "2", 1, {"0": [1, 2]})  # before its first checkpoint
    assert ended.returncode == 0, ended.stderr
    lines = kept(tmp_path)
    assert {(line["attempt"], line["iter"]) for line in lines if line["iter"] == 0} == {(1, 0)}
    assert len(lines) == 2 * EPOCHS * 13


def test_too_few_ranks_are_left(tmp_path: Path) -> None:
    ended = train(tmp_path, "2:2", 1, {"0": [1, 2], "1": [0, 2]})
    assert ended.returncode == 137
    assert "Starting again with 2 ranks, as many as are left (restart 1 of 1)." in ended.stderr
