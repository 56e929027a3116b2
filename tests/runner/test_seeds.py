"""Which random numbers are the same on all ranks, and which are not."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from lockstep.dist import all_gather_object
from lockstep.runner import Runner
from lockstep.strategy import FSDPStrategy
from lockstep.testing import ranks

from ..runs import StopAfter


class Drawing(Dataset[tuple[Tensor, Tensor]]):
    """Shows the number of a sample, and what is drawn where it is made."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.tensor([float(index)]), torch.rand(1)


class Net(nn.Module):
    """Notes its batches and what is drawn beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(1, 8), nn.Linear(8, 1)
        self.seen: dict[str, list[Any]] = {"samples": [], "made": [], "mask": [], "python": [], "numpy": []}

    def forward(self, samples: Tensor, made: Tensor) -> Tensor:
        mask = nn.functional.dropout(torch.ones(16), 0.5)
        drawn = [samples.tolist(), made.tolist(), mask.tolist(), random.random(), np.random.rand()]
        for values, value in zip(self.seen.values(), drawn, strict=True):
            values.append(value)
        return self.second(self.first(samples)).mean()


def train(work_dir: Path, different: bool, workers: int = 0, **options: Any) -> list[dict[str, list[Any]]]:
    """Return what each rank has seen."""
    model = Net()
    context = {"num_workers": workers, "multiprocessing_context": "fork"} if workers else {}
    runner = Runner(
        model,
        work_dir,
        train_dataloader={"dataset": Drawing(), "batch_size": 2, **context},
        train_cfg={"max_epochs": 1},
        optim_wrapper={"optimizer": {"type": "SGD", "lr": 1e-3}},
        randomness={"seed": 3, "diff_rank_seed": different},
        visualizer=[],
        **options,
    )
    runner.train()
    return all_gather_object(model.seen)


@ranks(2)
@pytest.mark.parametrize("workers", [0, 1])
def test_dropout_numpy_and_python_differ_between_ranks_where_it_is_asked_for(workers: int, tmp_path: Path):
    alike, apart = train(tmp_path, False, workers), train(tmp_path, True, workers)
    for kind in ("mask", "python", "numpy"):
        assert alike[0][kind] == alike[1][kind]
        assert apart[0][kind] != apart[1][kind]
    assert (alike[0]["made"] == alike[1]["made"]) == (workers == 0)
    assert apart[0]["made"] != apart[1]["made"]
    assert [seen["samples"] for seen in alike] == [seen["samples"] for seen in apart]
    assert apart == train(tmp_path, True, workers)


@ranks(4)
def test_ranks_that_compute_together_draw_the_same(tmp_path: Path):
    plan = {"degree": 2, "plan": {"first": "colwise", "second": "rowwise"}}
    seen = train(tmp_path, True, strategy=FSDPStrategy(tensor_parallel=plan))
    assert seen[0] == seen[1]
    assert seen[2] == seen[3]
    for kind in ("samples", "mask", "python", "numpy"):
        assert seen[0][kind] != seen[2][kind]


@ranks(2)
def test_each_rank_goes_on_with_its_own_numbers(tmp_path: Path):
    whole = train(tmp_path / "whole", True)
    every = {"default_hooks": {"checkpoint": {"by_epoch": False, "interval": 1}}}
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "work", True, custom_hooks=[StopAfter(2)], **every)
    resumed = train(tmp_path / "work", True, resume=True, **every)
    assert len(whole[0]["mask"]) == 4
    for rank in (0, 1):
        assert resumed[rank] == {kind: values[2:] for kind, values in whole[rank].items()}
