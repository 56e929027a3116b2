"""What a session evaluates in the user's own code, and rows that it gathers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - as everybody calls it
from torch.utils.data import DataLoader, TensorDataset

from lockstep.dist import get_rank
from lockstep.errors import ConfigError
from lockstep.testing import ranks

from .by_hand import STRATEGIES, X, loader, network, session_of


@pytest.mark.parametrize("strategy", STRATEGIES)
@ranks(1, 2, 3)
def test_gathered_rows_are_the_dataset_in_its_order(tmp_path, strategy):
    session = session_of(tmp_path, strategy=strategy)
    model = network()
    model, _, _ = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader())
    rows = TensorDataset(X[:7], torch.arange(7))
    val = session.prepare_evaluation(DataLoader(rows, batch_size=2))
    for _ in range(2):
        parts = [session.gather(model(x), number) for x, number in val]
        assert torch.cat([numbers for _, numbers in parts]).tolist() == list(range(7))
        assert sum(len(outputs) for outputs, _ in parts) == 7
    assert len(val) == len(parts)  # on every rank, also on one with fewer batches of its own
    assert val.dataset is rows
    for wrong, says in ((X[0].sum(), "a tensor without dimensions"), ([1], "a list")):
        with pytest.raises(TypeError, match=rf"one row per sample, but got {says} \(rank {get_rank()} of"):
            session.gather(wrong)
    with pytest.raises(ValueError, match=rf"but they have \[2, 3\] rows \(rank {get_rank()} of"):
        session.gather(X[:3], X[:2])
    if session.world_size > 1:
        with pytest.raises(ValueError, match=r"one shape on all ranks, but theirs are \(1,\), \(2,\).* Pad them alike"):
            session.gather(X[:2, : get_rank() + 1])


@pytest.mark.parametrize("by", ["batch_sampler", "sampler"])
@ranks(1, 2)
def test_rows_of_batches_that_the_user_has_made_come_back_in_their_order(tmp_path: Path, by: str):
    session = session_of(tmp_path)
    model = network()
    model, _, train = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader())
    numbers = TensorDataset(torch.arange(8))
    batches: dict[str, Any] = {by: [[6, 0, 3], [5], [1, 2], [4, 7]]}
    if by == "sampler":  # which draws lists of indices
        batches["batch_size"] = None
    own, plain = (session.prepare_evaluation(DataLoader(numbers, **each)) for each in (batches, {"batch_size": 3}))
    for _ in session.epochs(1):
        for x, y in train:
            session.step(F.cross_entropy(model(x), y))
        assert torch.cat([session.gather(rows) for (rows,) in own]).tolist() == [6, 0, 3, 5, 1, 2, 4, 7]
        assert torch.cat([session.gather(rows) for (rows,) in plain]).tolist() == list(range(8))


@pytest.mark.parametrize("strategy", STRATEGIES)
@ranks(1, 2, 3)
def test_a_loss_over_the_samples_of_all_ranks_has_each_once_where_a_rank_has_run_out(tmp_path, strategy):
    def contrastive(image, text):
        return F.cross_entropy(image @ text.T, torch.arange(len(image)))

    session = session_of(tmp_path, strategy=strategy)
    data, model, plain = TensorDataset(torch.arange(22)), network()[0], network()[0]
    order = list(range(21))
    batches = [order[i : i + 3] for i in range(0, 21, 3)]  # 7, so that of 2 and of 3 ranks one runs out
    model, _, mine = session.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(data, batch_sampler=batches)
    )
    seen = []
    for _ in session.epochs(1):
        for (rows,) in mine:
            image, text, all_rows = session.gather(model(X[rows]), model(X[rows].flip(1)), rows, sync_grads=True)
            session.step(contrastive(image, text))
            seen.append(all_rows.tolist())
    step = 3 * session.world_size
    assert seen == [order[i : i + step] for i in range(0, 21, step)]
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for rows in seen:
        optimizer.zero_grad()
        contrastive(plain(X[rows]), plain(X[rows].flip(1))).backward()
        optimizer.step()
    trained = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    torch.testing.assert_close(trained, [*plain.parameters()], check_stride=False)


@ranks(2)
def test_gradients_of_rows_that_ranks_share_are_refused(tmp_path):
    strategy = {"type": "fsdp", "tensor_parallel": {"degree": 2, "plan": {"0": "colwise", "3": "rowwise"}}}
    session = session_of(tmp_path, strategy=strategy)
    model = network()
    model, _, _ = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader(batch_size=2))
    with pytest.raises(ConfigError, match=rf"tensor_parallel ranks share them \(rank {get_rank()} of 2\)\. Use strat"):
        session.gather(X, sync_grads=True)


@ranks(2)
def test_a_gradient_that_ends_in_gather_is_told(tmp_path):
    session = session_of(tmp_path, log_level="WARNING")
    model = network()
    model, _, batches = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader())
    val = session.prepare_evaluation(loader(shuffle=False))
    told = []
    for _ in session.epochs(1):
        for number, (x, y) in enumerate(batches):
            outputs = model(x)
            for rows, _ in val if number == 0 else ():
                session.gather(model(rows))
            session.gather(outputs if number > 1 else outputs.detach(), y)
            if session.is_main:
                told.append((session.run_dir / "log.txt").read_text().count("requires grad, whose gradient ends there"))
            session.step(F.cross_entropy(outputs, y))
    assert told == [0, 0, 1, 1, 1, 1][: len(told)]


@ranks(2)
def test_a_validation_changes_no_random_number_of_training(tmp_path):
    plain, validated = [], []
    for losses, validates in ((plain, False), (validated, True)):
        session = session_of(tmp_path / str(validates))
        model = network()
        model, _, batches = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader())
        val = session.prepare_evaluation(loader(shuffle=False))
        for _ in session.epochs(2):
            for x, y in batches:
                loss = F.cross_entropy(model(x), y)
                session.step(loss)
                losses.append(loss.item())
            if validates:
                for x, _ in val:
                    session.gather(F.dropout(model(x)))
    assert plain == validated


def test_records_and_metrics_are_those_of_a_run(tmp_path):
    session = session_of(tmp_path, default_hooks={"logger": {"interval": 1}, "checkpoint": {"save_best": "accuracy"}})
    model = network()
    model, _, batches = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader())
    for epoch in session.epochs(2):
        for x, y in batches:
            session.step(F.cross_entropy(model(x), y), norm=model[0].weight.norm())
            session.log(half=numpy.float32(0.5), count=numpy.int64(3))
        session.log_metrics(accuracy=numpy.float32(1.0 - epoch))
    records = [json.loads(line) for line in (session.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert {"loss", "norm", "half", "lr", "samples_per_second"} <= records[0].keys()
    assert (records[0]["half"], records[0]["count"]) == (0.5, 3)
    assert [record["accuracy"] for record in records if record["mode"] == "val"] == [1.0, 0.0]
    assert session.work_dir == session.run_dir.parent
    assert (session.run_dir / "best_accuracy_epoch_1").is_dir()
    assert (session.run_dir / "epoch_2").is_dir()


@ranks(1, 3)
def test_a_pass_over_evaluation_data_within_another_is_refused(tmp_path):
    session = session_of(tmp_path)
    model = network()
    session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader())
    one, other = session.prepare_evaluation(loader()), session.prepare_evaluation(loader())
    with pytest.raises(RuntimeError, match=r"began within another one.* \(rank . of .\)\. Go through one after the"):
        next(zip(one, other, strict=True))
    assert len(torch.cat([session.gather(y) for x, y in one])) == len(X)
