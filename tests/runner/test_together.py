"""Validation of a sharded model on ranks that hold unequal amounts of data."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lockstep.dist import get_rank
from lockstep.errors import ConfigError
from lockstep.evaluator import BaseMetric
from lockstep.runner import Runner
from lockstep.runner.together import in_step
from lockstep.testing import ranks

X = torch.linspace(-1, 1, 20).reshape(10, 2)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 1)

    def forward(self, x: Tensor, mode: str = "tensor") -> Tensor:
        return self.linear(x) if mode == "predict" else self.linear(x).square().mean()


class Predictions(BaseMetric):
    """Counts what was predicted, and sums it up."""

    def process(self, data_batch, data_samples) -> None:
        self.results.extend(data_samples.flatten().tolist())

    def compute_metrics(self, results) -> dict[str, float]:
        return {"count": len(results), "sum": sum(results)}


@ranks(2, 4)
@pytest.mark.parametrize("batches", [[3, 2, 1, 1], [1, 1, 2, 3], [2, 2, 2, 2]])
def test_whoever_has_run_out_repeats_its_last_batch(batches):
    own = [f"{get_rank()}{index}" for index in range(batches[get_rank()])]
    size = torch.distributed.get_world_size()
    expected = [(batch, True) for batch in own] + [(own[-1], False)] * (max(batches[:size]) - len(own))
    assert list(in_step(own)) == expected


@ranks(2)
def test_nobody_waits_where_some_rank_has_nothing():
    assert list(in_step([])) == []
    with pytest.raises(ConfigError, match=r"none for the ranks \[1\]"):
        list(in_step([1, 2] if get_rank() == 0 else []))


@ranks(2)
@pytest.mark.parametrize(("samples", "batch_size"), [(9, 1), (10, 2), (5, 2)])
def test_every_sample_counts_once_under_fsdp(samples, batch_size, tmp_path: Path):
    torch.manual_seed(2)
    net = Net()
    expected = net(X[:samples], mode="predict").sum().item()
    data = TensorDataset(X[:samples])
    runner = Runner(
        net,
        tmp_path,
        val_dataloader={"dataset": data, "batch_size": batch_size},
        val_evaluator=Predictions(),
        strategy="fsdp",
    )
    metrics = runner.val()
    assert metrics["count"] == samples
    assert metrics["sum"] == pytest.approx(expected, rel=1e-5)


@ranks(2)
def test_training_with_validations_in_between_is_the_same_under_ddp_and_fsdp(tmp_path: Path):
    loader = {"dataset": TensorDataset(X[:9]), "batch_size": 2}
    metrics = []
    for strategy in ("ddp", "fsdp"):
        torch.manual_seed(2)
        runner = Runner(
            Net(),
            tmp_path,
            train_dataloader=loader,
            train_cfg={"max_epochs": 3},
            val_dataloader=loader,
            val_evaluator=Predictions(),
            optim_wrapper={"optimizer": {"type": "SGD", "lr": 0.5, "momentum": 0.9}, "clip_grad": {"max_norm": 0.5}},
            randomness={"seed": 4},
            strategy=strategy,
        )
        runner.train()
        metrics.append(runner.last_evaluation.metrics)
    assert metrics[1] == pytest.approx(metrics[0], rel=1e-5)
    assert metrics[0]["count"] == 9
