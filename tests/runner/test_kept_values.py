"""Values that are kept beyond a step, of models that write them again in the next one, as CUDA graphs do."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lockstep import Runner, Session
from lockstep.evaluator import BaseMetric
from lockstep.testing import ranks

DATA = TensorDataset(torch.arange(8.0).view(8, 1), torch.zeros(8, 1))


class Overwrites(nn.Module):
    """Writes NaN into what it returned before, in each call, and logs a parameter that each update makes smaller."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self._returned: list[Tensor] = []

    def forward(self, x: Tensor, y: Tensor, mode: str = "loss") -> Any:
        with torch.no_grad():
            for output in self._returned:
                output.detach().fill_(math.nan)
        if mode == "predict":
            self._returned = [x * 2]
            return self._returned[0], y
        loss = self.scale + 0.0 * x.sum()
        self._returned = [loss]
        return {"loss": loss, "scale": self.scale}


class Sum(BaseMetric):
    """Keeps predictions as they are."""

    def process(self, data_batch: Any, data_samples: Any) -> None:
        self.results.append(data_samples[0])

    def compute_metrics(self, results: list[Any]) -> dict[str, float]:
        return {"sum": float(torch.cat(results).sum())}


@contextmanager
def cuda_graphs_used() -> Iterator[list[int]]:
    """Let torch's module of CUDA graphs be imported, as it is once one was made; note each step that is marked."""
    marked: list[int] = []
    mark = torch.compiler.cudagraph_mark_step_begin
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of torch's own imports
        mark()
    torch.compiler.cudagraph_mark_step_begin = lambda: marked.append(1)
    try:
        yield marked
    finally:
        torch.compiler.cudagraph_mark_step_begin = mark


def records_of(folder: Path) -> list[dict[str, Any]]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["mode"] == "train"]


def options(work_dir: Path, strategy: str) -> dict[str, Any]:
    hooks = {"logger": {"interval": 4}, "checkpoint": None, "nan_check": {"interval": 2}}
    return {"work_dir": work_dir, "strategy": strategy, "default_hooks": hooks, "log_level": "ERROR"}


# The parameter before each of four updates by 1/8: 1, 7/8, 6/8, 5/8.
MEAN = 1 - 1.5 / 8


def trained(work_dir: Path, strategy: str) -> Runner:
    size = 2 if strategy == "single" else 1
    runner = Runner(
        Overwrites(),
        train_dataloader=DataLoader(DATA, batch_size=size),
        val_dataloader=DataLoader(DATA, batch_size=1),
        val_evaluator=Sum(),
        optim_wrapper={"optimizer": {"type": "SGD", "lr": 1 / 8}},
        train_cfg={"max_epochs": 1},
        **options(work_dir, strategy),
    )
    runner.train()
    return runner


@ranks(1)
def test_values_of_a_step_are_recorded_as_they_were_in_it(tmp_path: Path) -> None:
    record = records_of(trained(tmp_path, "single").run_dir)[0]
    assert record["loss"] == record["scale"] == MEAN


@ranks(2)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_values_of_a_step_are_recorded_as_they_were_in_it_by_all_ranks(tmp_path: Path, strategy: str) -> None:
    runner = trained(tmp_path, strategy)
    if runner.run.rank == 0:
        record = records_of(runner.run_dir)[0]
        assert record["loss"] == record["scale"] == MEAN


@ranks(1)
def test_predictions_are_kept_as_they_were_and_each_step_is_marked(tmp_path: Path) -> None:
    with cuda_graphs_used() as steps:
        runner = trained(tmp_path, "single")
    assert runner.run.last_evaluation is not None
    assert runner.run.last_evaluation.metrics == {"sum": 56.0}
    assert len(steps) == 4 + 8  # of training and validation


@ranks(1)
def test_a_loop_by_hand_keeps_values_and_marks_its_steps(tmp_path: Path) -> None:
    session = Session(**options(tmp_path, "single"))
    model = Overwrites()
    optimizer = torch.optim.SGD(model.parameters(), lr=1 / 8)
    model, _, batches = session.prepare(model, optimizer, DataLoader(DATA, batch_size=2))
    validation = session.prepare_evaluation(DataLoader(DATA, batch_size=4))
    with cuda_graphs_used() as steps:
        for _ in session.epochs(1):
            for x, y in batches:
                losses = model(x, y)
                session.step(losses, again=losses["scale"])
            with torch.no_grad():
                seen = [session.gather(model(x, y, mode="predict")[0]) for x, y in validation]
            assert torch.cat(seen).sum() == 56.0
    record = records_of(session.run_dir)[0]
    assert record["loss"] == record["scale"] == record["again"] == MEAN
    assert len(steps) == 4 + 2
