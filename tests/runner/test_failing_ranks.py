"""What fails on one rank ends all of them: nobody waits for ever, and the exit code tells."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from textwrap import dedent
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from lockstep.dist import all_gather_object, get_rank
from lockstep.errors import ConfigError, DistError
from lockstep.evaluator import Accuracy, BaseMetric
from lockstep.runner import Runner
from lockstep.testing import RankFailure, ranks, run_ranks


class Points(Dataset[tuple[Tensor, Tensor]]):
    def __init__(self, broken: bool = False, length: int = 8) -> None:
        self.broken, self.length = broken, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if self.broken and index > 3 and get_rank() == 1:
            raise OSError("the disk is gone")
        return torch.ones(1), torch.tensor(0)


class Net(nn.Module):
    def __init__(self, vector: bool = False, nan: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(1, 2)
        self.vector, self.nan = vector, nan

    def forward(self, x: Tensor, y: Tensor, mode: str = "tensor"):
        scores = self.linear(x)
        if mode == "predict":
            return scores, y
        if self.vector and get_rank() == 1:
            return scores.square()
        return scores.square().mean() * (torch.nan if self.nan and get_rank() == 1 else 1.0)


class Choosy(Accuracy):
    def process(self, data_batch: Any, data_samples: Any) -> None:
        if get_rank() == 1:
            raise LookupError("no such class")
        super().process(data_batch, data_samples)


class Silent(BaseMetric):
    def process(self, data_batch: Any, data_samples: Any) -> None:
        self.results.append(1)

    def compute_metrics(self, results: list[Any]) -> Any:
        return None


def count(batch: Any) -> int:
    if get_rank() == 1:
        raise ArithmeticError("cannot count these")
    return len(batch[0])


CASES: dict[str, tuple[dict[str, Any], str]] = {
    "data": ({"train_dataloader": {"dataset": Points(broken=True), "shuffle": False}}, "OSError: the disk is gone"),
    "loss": ({"model": Net(vector=True)}, "ValueError: the loss must be a scalar, but has shape (2, 2)"),
    "metric": (
        {"val_dataloader": {"dataset": Points(), "batch_size": 2}, "val_evaluator": Choosy()},
        "LookupError: no such class",
    ),
    "count": ({"train_cfg": {"max_epochs": 1, "batch_size_of": count}}, "ArithmeticError: cannot count these"),
}


def train(folder: Path, case: str, strategy: str) -> None:
    run(folder, {"strategy": strategy, **CASES[case][0]})


def run(folder: Path, changes: dict[str, Any]) -> None:
    Runner(
        **{
            "model": Net(),
            "work_dir": folder,
            "train_dataloader": {"dataset": Points(), "batch_size": 2},
            "train_cfg": {"max_epochs": 1},
            "optim_wrapper": {"optimizer": {"type": "SGD", "lr": 0.1}},
            "visualizer": [],
            **changes,
        }
    ).train()


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("case", CASES)
def test_a_fault_of_one_rank_is_told_as_the_cause(case, strategy, tmp_path: Path):
    with pytest.raises(RankFailure, match="train on 2 ranks: rank 1 raised") as caught:
        run_ranks(2, train, tmp_path, case, strategy)
    cause = caught.value.reports[0]
    assert cause.rank == 1
    assert CASES[case][1] in cause.detail
    assert "(rank 1 of 2, after" in cause.detail


class Unwritable:
    """A config of another library."""

    def dump(self, file: Path) -> None:
        raise OSError("no config can be written")


# Faults that every rank learns of before one of them goes on.
SHARED: dict[str, tuple[dict[str, Any], str]] = {
    "nan": ({"model": Net(nan=True)}, "the loss must be finite, but is not in iteration 1"),
    "metric": (
        {"val_dataloader": {"dataset": Points(), "batch_size": 2}, "val_evaluator": Silent()},
        "Silent.compute_metrics() must return a dict of numbers by name, but returned None",
    ),
    "short": (
        {"train_dataloader": {"dataset": Points(length=1), "batch_size": 2}},
        "`dataset` must have at least 2 samples, one for each rank, but has 1",
    ),
    "folder": (
        {"work_dir": "/proc/nowhere"},
        "`work_dir` must be a folder that can be created and written to, but /proc/nowhere",
    ),
    "config": ({"cfg": Unwritable()}, "no config can be written"),
}


def train_with_a_shared_fault(folder: Path, case: str) -> None:
    changes, says = SHARED[case]
    with pytest.raises(
        (ArithmeticError, ConfigError, DistError, OSError, TypeError, ValueError), match=re.escape(says)
    ):
        run(folder, changes)


@pytest.mark.parametrize("case", SHARED)
def test_a_fault_that_ranks_share_is_raised_on_all(case: str, tmp_path: Path):
    run_ranks(2, train_with_a_shared_fault, tmp_path, case)


SCRIPT = """
    import torch
    from torch import nn
    from lockstep import Runner
    from lockstep.dist import get_rank

    class Net(nn.Linear):
        def forward(self, x):
            out = super().forward(x).square()
            return out if get_rank() == 1 else out.mean()

    Runner(Net(1, 1), "work", train_dataloader=[torch.ones(2, 1)] * 4, train_cfg=dict(max_epochs=1)).train()
"""


@pytest.mark.jobs
def test_a_job_that_fails_says_why_and_ends(tmp_path: Path):
    (tmp_path / "job.py").write_text(dedent(SCRIPT))
    done = subprocess.run(
        [sys.executable, "-m", "lockstep", "launch", "--nproc", "2", "job.py"],
        cwd=tmp_path,
        env=os.environ,
        capture_output=True,
        text=True,
        timeout=120,  # far beyond what it takes: nobody waits
        check=False,
    )
    assert done.returncode == 1
    assert "the loss must be a scalar, but has shape (2, 1)" in done.stderr


@ranks(2)
def test_a_failing_search_for_the_checkpoint_to_resume_from_reaches_every_rank(tmp_path: Path):
    (tmp_path / "last_checkpoint").write_text("run/epoch_1\n")
    read_bytes = Path.read_bytes

    def read(path: Path) -> bytes:
        if path.name == "last_checkpoint":
            assert get_rank() == 0, "rank 0 alone looks"
            raise OSError("the disk is gone")
        return read_bytes(path)

    with patch.object(Path, "read_bytes", read), pytest.raises(ConfigError, match="the disk is gone"):
        Runner(Net(), tmp_path, train_dataloader=[(torch.ones(1, 2),)], resume=True).train()
    assert all_gather_object(1) == [1, 1]
