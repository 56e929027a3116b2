"""Data of a thousand million samples, of which only the length is large: what a run holds of it."""

from __future__ import annotations

import re
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lockstep import Session
from lockstep.dataset import DefaultSampler
from lockstep.runner import Runner
from lockstep.testing import ranks

SMALL, LARGE, MIB = 10**3, 10**9, 2**20
ITERS, BATCH = 3, 2


class Numbers(Dataset[Tensor]):
    def __init__(self, size: int) -> None:
        self.size = size
        self.seen: list[int] = []

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Tensor:
        self.seen.append(index)
        return torch.tensor([index / self.size])


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(1, 1)

    def forward(self, x: Tensor, mode: str = "loss") -> Tensor:
        return self.linear(x).square().mean()


def by_runner(size: int, work_dir: Path, resume: bool = False) -> list[int]:
    """Train for some iterations, or for as many more; return the samples that this rank has read."""
    data = Numbers(size)
    Runner(
        Net(), work_dir, visualizer=[], log_level="ERROR", randomness={"seed": 3}, resume=resume,
        train_dataloader={"dataset": data, "batch_size": BATCH},
        train_cfg={"by_epoch": False, "max_iters": (1 + resume) * ITERS, "val_begin": 10**9},
        val_dataloader={"dataset": Numbers(size), "batch_size": BATCH}, val_cfg={}, val_evaluator={"type": "Accuracy"},
        optim_wrapper={"optimizer": {"type": "SGD", "lr": 0.1}},
        default_hooks={"checkpoint": {"type": "CheckpointHook", "interval": ITERS, "by_epoch": False}},
    ).train()  # fmt: skip
    return data.seen


def by_session(size: int, work_dir: Path, resume: bool = False) -> list[int]:
    data = Numbers(size)
    session = Session(work_dir, log_level="ERROR", resume=resume, randomness={"seed": 3})
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = session.prepare(model, optimizer, DataLoader(data, BATCH, shuffle=True))
    for _ in session.epochs(1):
        for batch in loader:
            if session.iter == (1 + resume) * ITERS:
                return data.seen
            session.step(model(batch))
            if session.iter + 1 == (1 + resume) * ITERS:
                session.save()
    raise AssertionError


def memory(kind: str) -> int:
    """Return the present (`VmRSS`) or the highest (`VmHWM`) memory of this process in bytes."""
    return 1024 * int(re.search(rf"{kind}:\s+(\d+)", Path("/proc/self/status").read_text())[1])


@ranks(2)
@pytest.mark.checkpoints
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux says there how much memory was used")
@pytest.mark.parametrize("train", [by_runner, by_session])
def test_it_takes_no_memory_and_is_resumed(train: Any, tmp_path: Path):
    for resume in (False, True):
        train(SMALL, tmp_path / "small", resume)
    Path("/proc/self/clear_refs").write_text("5")  # the highest memory is measured from now on
    before = memory("VmRSS")
    seen = [train(LARGE, tmp_path / "large", resume) for resume in (False, True)]
    assert memory("VmHWM") - before < 50 * MIB
    expected = iter(DefaultSampler(range(LARGE), seed=3))
    assert [part[: ITERS * BATCH] for part in seen] == [list(islice(expected, ITERS * BATCH)) for _ in seen]
