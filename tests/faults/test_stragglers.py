"""A rank that is slow is named, and at what it is slow, within 20 iterations; healthy ranks are not."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from lockstep.dist import get_rank, get_world_size
from lockstep.hooks import Hook
from lockstep.testing import ranks

from .runs import make_model, make_runner

SECONDS = 0.08
ROUNDS = int(os.environ.get("LOCKSTEP_FAULTS_ROUNDS", "1"))  # as often, each beginning at another iteration
STEPS = int(os.environ.get("LOCKSTEP_FAULTS_ITERS", "100"))
PARTS = {"data": "data", "forward": "compute", "backward": "compute"}


class Fault(Hook):
    """Slows down one thing on the last rank, from one iteration to another.

    Attributes:
        what: a key of `PARTS`.
        begin: the iterations after which it begins.
        end: those after which it ends.
    """

    def __init__(self, what: str, begin: int, end: int = 10**6) -> None:
        self.what, self.begin, self.end, self.iteration = what, begin, end, 0

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None) -> None:
        self.iteration = runner.iter + 1

    def pause(self, what: str) -> None:
        if what == self.what and self.begin <= self.iteration < self.end and get_rank() == get_world_size() - 1:
            time.sleep(SECONDS)


class Data(Dataset):
    def __init__(self, fault: Fault) -> None:
        self.fault, self.rows = fault, torch.randn(64, 8, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int):
        if index >= 0:
            return self.rows[index], self.rows[index]
        raise IndexError

    def __getitems__(self, indices: list[int]):
        self.fault.pause("data")
        return [self[index] for index in indices]


class _Pause(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, fault: Fault) -> Tensor:
        ctx.fault = fault
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor):
        ctx.fault.pause("backward")
        return gradient, None


class Model(nn.Module):
    def __init__(self, fault: Fault) -> None:
        super().__init__()
        self.fault, self.layers = fault, make_model()

    def forward(self, x: Tensor) -> Tensor:
        self.fault.pause("forward")
        return _Pause.apply(self.layers(x), self.fault)


def train(folder: Path, fault: Fault, iters: int, strategy: Any = None, **changes: Any) -> list[dict[str, Any]]:
    """Train, and return what rank 0 has recorded of stragglers."""
    runner = make_runner(
        folder, strategy or "ddp", [fault], iters,
        **{"model": Model(fault), "train_dataloader": {"dataset": Data(fault), "batch_size": 4}, **changes},
    )  # fmt: skip
    runner.train()
    rows = [json.loads(line) for line in (runner.run_dir / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row["mode"] == "straggler"] if get_rank() == 0 else []


@ranks(2, 4, timeout=600)
@pytest.mark.parametrize("what", PARTS)
def test_the_slow_rank_and_what_is_slow_are_named_within_20_iterations(tmp_path: Path, what):
    for number in range(ROUNDS):
        begin = 20 + (7 * number + 3) % 10
        found = train(tmp_path / str(number), Fault(what, begin), begin + 21)
        if get_rank() == 0:
            assert len(found) == 1, found
            (row,) = found
            assert (row["rank"], row["part"]) == (get_world_size() - 1, PARTS[what]), found
            assert row["iter"] <= begin + 20
            assert row["begin"] >= begin - 9  # the samples before are other ones
            # Sleeping takes at least so long; a loaded machine makes it longer.
            assert row["seconds"] - row["others"] > 0.5 * SECONDS


@ranks(2, timeout=120)
def test_it_is_told_once_and_when_it_ends(tmp_path: Path):
    found = train(tmp_path, Fault("forward", 20, end=60), 120)
    if get_rank() == 0:
        assert [(row["rank"], row["part"]) for row in found] == [(1, "compute"), (1, None)], found
        assert found[1]["iter"] > 60
        (log,) = tmp_path.glob("*/log.txt")
        text = log.read_text()
        assert text.count("rank 1 of 2 (on ") == 2
        assert "is slow: its forward and backward passes take" in text
        assert "is no longer slow" in text


@ranks(2, timeout=120)
def test_without_the_wait_of_others_only_slow_data_are_found(tmp_path: Path):
    for what, count in (("data", 1), ("forward", 0)):
        found = train(tmp_path / what, Fault(what, 20), 45, strategy={"type": "fsdp"})
        if get_rank() == 0:
            assert [(row["rank"], row["part"]) for row in found] == [(1, "data")] * count, found


@ranks(2, timeout=120)
def test_torchs_own_ddp_is_measured_too(tmp_path: Path):
    fault = Fault("forward", 20)
    model = nn.parallel.DistributedDataParallel(Model(fault))
    found = train(tmp_path, fault, 60, model=model)
    if get_rank() == 0:
        assert [(row["rank"], row["part"]) for row in found] == [(1, "compute")], found


@ranks(2)
def test_it_can_be_turned_off(tmp_path: Path):
    logger = {"default_hooks": {"progress": None, "checkpoint": None, "logger": {"slow_factor": None}}}
    assert train(tmp_path, Fault("forward", 10), 40, **logger) == []


@ranks(2, 4, timeout=600)
def test_healthy_ranks_are_not_called_slow(tmp_path: Path):
    assert train(tmp_path, Fault("nothing", 0), STEPS) == []
