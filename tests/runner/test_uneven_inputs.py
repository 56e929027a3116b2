"""Passes in step, and validation of a sharded model on ranks that hold unequal amounts of data."""

from __future__ import annotations

import logging
import subprocess
import sys
from dataclasses import dataclass
from multiprocessing import active_children
from pathlib import Path
from textwrap import dedent
from typing import Any
from unittest.mock import MagicMock, patch

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, SequentialSampler, TensorDataset

from lockstep.dataset import DefaultSampler, InfiniteSampler, build_dataloader
from lockstep.dataset.position import Position
from lockstep.dist import barrier, get_rank, get_world_size
from lockstep.errors import ConfigError
from lockstep.evaluator import BaseMetric
from lockstep.runner import Runner, uneven_inputs
from lockstep.runner.uneven_inputs import EvenBatches, prefetching
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
    longest = max(batches[: get_world_size()])
    even = EvenBatches(own)
    assert even.length == longest
    for _ in range(2):
        batches = list(even.iterate())
        assert [batch.data for batch in batches] == own + [own[-1]] * (longest - len(own))
        assert [batch.is_own for batch in batches] == [True] * len(own) + [False] * (longest - len(own))
        assert [batch.samples for batch in batches] == [1] * len(own) + [0] * (longest - len(own))


@ranks(2, 4)
def test_whoever_has_nothing_gets_the_batch_of_another():
    own = [torch.full((3,), 7.0)] if get_rank() == 1 else []
    (batch,) = EvenBatches(own).iterate()
    assert batch.data.tolist() == [7.0] * 3
    assert (batch.samples, batch.mean_samples) == (3 * (get_rank() == 1), 3 / get_world_size())
    assert batch.is_own == (get_rank() == 1)
    assert list(EvenBatches([]).iterate()) == []


@ranks(2)
@pytest.mark.parametrize("kind", ["lockstep's", "torch's", "of its own"])
@pytest.mark.parametrize(("samples", "own"), [(8, [[2, 2], [2, 2]]), (7, [[2, 2], [2, 1]])])
def test_nothing_is_told_where_samplers_know(kind, samples, own):
    loader = build_dataloader({"dataset": range(samples), "batch_size": 2, "sampler": {"round_up": False}}, seed=0)
    if kind == "torch's":  # which leaves out what can't be shared out
        sampler = DistributedSampler(range(samples), drop_last=True)
        loader, own = DataLoader(range(samples), 2, sampler=sampler), [[2, 2], [2, 2]] if samples == 8 else [[2, 1]] * 2
    elif kind == "of its own":
        loader = DataLoader(range(sum(own[get_rank()])), 2, shuffle=True)
    even = EvenBatches(loader)
    # One after the other: whoever waited for the other would wait for ever.
    for rank in range(2):
        if rank == get_rank():
            batches = list(even.iterate())
        barrier()
    assert [batch.samples for batch in batches] == own[get_rank()]
    assert [batch.mean_samples for batch in batches] == [sum(pair) / 2 for pair in zip(*own, strict=True)]


class SkipsSome(DataLoader[Any]):
    """Leaves out batches on one rank, as those that can't be read."""

    def __iter__(self) -> Any:
        return (batch for batch in super().__iter__() if get_rank() == 0 or batch[0] >= 4)


@ranks(2)
def test_a_loader_that_leaves_out_batches_of_its_own_accord_is_not_counted_by_its_sampler():
    batches = [*EvenBatches(SkipsSome(range(8), 2, sampler=SequentialSampler(range(8)))).iterate()]
    assert [batch.samples for batch in batches] == ([2, 2, 2, 2], [2, 2, 0, 0])[get_rank()]
    assert [batch.mean_samples for batch in batches] == [2, 2, 1, 1]


@ranks(2)
def test_going_on_inside_a_pass_that_is_over_for_some():
    even = EvenBatches([1, 2, 3] if get_rank() == 0 else [4])
    assert [batch.data for batch in even.iterate(Position(batches=2))] == [3]


def test_positions_between_a_sampler_of_epochs_and_an_endless_one():
    by_epoch, endless = (
        EvenBatches(DataLoader(X, batch_size=2, sampler=sampler))
        for sampler in (DefaultSampler(X, seed=0, shard=(0, 1)), InfiniteSampler(X, seed=0, shard=(0, 1)))
    )
    begin = endless.read_position(by_epoch.position(3))
    again = endless.position(0, 0, begin)  # saved before the first batch
    assert (again["epoch"], again["samples"]) == (3, 0)
    saved = endless.position(0, 5)  # at the end of an order
    assert (saved["epoch"], saved["samples"], saved["batches"]) == (1, 0, 5)
    begin = by_epoch.read_position(saved)
    assert begin.batches == 5
    assert len(list(by_epoch.iterate(begin))) == 5


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


class Broken(Dataset[Tensor]):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Tensor:
        if index == 5:
            raise KeyError("image_5.png")
        return X[0]


def test_an_error_in_a_worker_ends_the_workers_at_once():
    before = set(active_children())
    with pytest.raises(KeyError, match="image_5"):
        list(EvenBatches(DataLoader(Broken(), batch_size=2, num_workers=2, multiprocessing_context="fork")).iterate())
    assert set(active_children()) <= before  # although the error still holds their iterator


SCRIPT = """
    import torch
    from torch.utils.data import DataLoader
    from lockstep import Runner

    class Net(torch.nn.Linear):
        def forward(self, x):
            raise ValueError("no such layer")

    if __name__ == "__main__":
        loader = DataLoader(torch.ones(8, 2), batch_size=2, num_workers=2, persistent_workers=True)
        Runner(Net(2, 1), "work", train_dataloader=loader, train_cfg=dict(max_epochs=1), visualizer=[]).train()
"""


def test_an_error_is_the_last_word_although_workers_persist(tmp_path):
    (tmp_path / "train.py").write_text(dedent(SCRIPT))
    ended = subprocess.run([sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 1
    assert ended.stderr.endswith("ValueError: no such layer\n(rank 0 of 1, after 0 iterations)\n")


class Counting(nn.Module):
    """Counts what it has seen, in a buffer that it replaces, one that it changes, and one that it adds."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 1)
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("summed", torch.zeros(()))
        self.register_buffer("late", None)

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.seen + len(x)
        self.summed += len(x)
        self.late = torch.full((), float(len(x))) + (0.0 if self.late is None else self.late)
        return self.linear(x).square().mean()


@ranks(2)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_rank_that_has_run_out_keeps_its_buffers(strategy: str, tmp_path: Path):
    own = [X[:2]] * (2 if get_rank() == 0 else 1)
    model = Counting()
    Runner(
        model, tmp_path, train_dataloader=own, train_cfg={"max_epochs": 1}, strategy=strategy, visualizer=[],
        optim_wrapper={"optimizer": {"type": "SGD", "lr": 0.1}}, default_hooks={"checkpoint": None}, log_level="ERROR",
    ).train()  # fmt: skip
    assert [float(buffer) for buffer in model.buffers()] == [2.0 * len(own)] * 3


class WronglySized(IterableDataset[Tensor]):
    def __init__(self, length: int, says: int) -> None:
        self.length, self.says = length, says

    def __len__(self) -> int:
        return self.says

    def __iter__(self):
        return iter(X[index % len(X)] for index in range(self.length))


@ranks(1, 2)
def test_one_iteration_more_than_the_length_says_is_refused_before_it_is_trained(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"must have 2 iterations in every epoch, .* has another one in epoch 1\."):
        train_wrongly_sized(tmp_path, length=6 * get_world_size(), says=4 * get_world_size())


@ranks(1, 2)
def test_a_last_epoch_that_is_too_short_is_told(tmp_path: Path):
    train_wrongly_sized(tmp_path, length=4 * get_world_size(), says=6 * get_world_size())
    barrier()  # rank 0 writes it
    text = next(tmp_path.glob("*/log.txt")).read_text()
    assert "must have 3 iterations in every epoch, as its length says, but had 2 in epoch 1" in text


def train_wrongly_sized(folder: Path, **lengths: int) -> None:
    Runner(
        Net(), folder, train_dataloader={"dataset": WronglySized(**lengths), "batch_size": 2},
        train_cfg={"max_epochs": 1}, optim_wrapper={"optimizer": {"type": "SGD", "lr": 0.1}}, visualizer=[],
        default_hooks={"checkpoint": None}, log_level="ERROR",
    ).train()  # fmt: skip


@dataclass
class WithLengths:
    """Keeps the lengths on the CPU."""

    values: Tensor
    lengths: Tensor

    def to(self, device: torch.device) -> WithLengths:
        return WithLengths(self.values.to(device), self.lengths)


def test_what_no_stream_can_keep_is_moved_without_one(monkeypatch):
    """torch has `record_stream` of dense tensors alone, and a packed sequence keeps a part on the CPU."""
    stream, kept = MagicMock(), []
    monkeypatch.setattr(torch, "Stream", lambda device: stream)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda: stream)
    monkeypatch.setattr(Tensor, "record_stream", lambda tensor, on: kept.append(tensor.layout))
    batch = {
        "dense": torch.ones(2), "sparse": torch.eye(2).to_sparse(), "packed": pack_sequence([torch.ones(3)]),
        "own": WithLengths(torch.ones(2), torch.ones(2)),
    }  # fmt: skip
    moved = prefetching(torch.device("meta"))([batch, "name"])[0]
    values = (moved["dense"], moved["sparse"], moved["packed"].data, moved["own"].values)
    assert {part.device.type for part in values} == {"meta"}
    assert moved["own"].lengths.device.type == "cpu"
    assert kept == [torch.strided]


@ranks(1, 2)
def test_a_dataset_that_grows_is_told_of_once():
    samples, said = list(range(8)), []
    loader = DataLoader(samples, batch_size=2, sampler=DefaultSampler(samples))
    batches = EvenBatches(loader)
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logger = logging.getLogger("lockstep.runner.uneven_inputs")
    logger.addHandler(handler)
    try:
        for grown in ([], [8, 9], [10]):
            samples += grown
            assert sum(batch.mean_samples for batch in batches.iterate()) * get_world_size() == 8
    finally:
        logger.removeHandler(handler)
    assert [text.partition(":")[0] for text in said] == [
        "the dataset, a list, has 10 samples now, but had 8 when its loader was prepared"
    ]


@ranks(1, 2)
def test_labels_that_are_left_out_are_told_of_where_samples_are_counted():
    def told(labels: list[list[int]], shards: int = get_world_size(), **options: Any) -> str:
        with patch.object(uneven_inputs, "_logger") as logger:
            list(EvenBatches([{"labels": torch.tensor(labels)}], shards=shards, **options).iterate())
        return str(logger.warning.call_args)

    padded = [[5, -100], [6, 7]]
    assert ("each sample counts alike, however many labels it has" in told(padded)) == (get_world_size() > 1)
    for others in (told([[5, 6], [6, 7]]), told(padded, count=len), told(padded, shards=0)):
        assert others == "None"
