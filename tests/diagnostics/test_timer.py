"""Tokens per second, of all ranks together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lockstep import Session
from lockstep.diagnostics import timer
from lockstep.dist import get_rank, get_world_size
from lockstep.errors import ConfigError
from lockstep.hooks import Hook, IterTimerHook, MFUHook
from lockstep.runner import loops
from lockstep.session import loop as own_loop
from lockstep.testing import ranks

from ..hooks.runs import make_runner

LENGTH, PADDING = 7, 2
IDS = torch.randint(11, (22, LENGTH), generator=torch.Generator().manual_seed(2))
MASK = torch.arange(LENGTH) < LENGTH - PADDING
TEXT = [{"input_ids": ids, "attention_mask": MASK.long(), "labels": ids.roll(-1)} for ids in IDS]


class Language(nn.Module):
    """Takes batches as HuggingFace's models do."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(11, 4), nn.Linear(4, 11)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.head(self.words(input_ids)).flatten(0, 1), labels.flatten())


def train(work_dir: Path, tokens_of: Any, **changes: Any) -> Any:
    hooks = {"checkpoint": None, "logger": {"interval": 2}, "timer": {"tokens_of": tokens_of}}
    data = {"dataset": TEXT, "batch_size": 6 // get_world_size()}
    runner = make_runner(
        work_dir,
        [MFUHook(1e9)],
        **{"kind": Language, "default_hooks": hooks, "train_dataloader": data, **changes},
    )
    runner.train()
    return runner


def records(run: Any) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run.run_dir / "metrics.jsonl").read_text().splitlines()]


def unmasked(batch: dict[str, Tensor]) -> Tensor:
    return batch["attention_mask"].sum()


def rows(batch: dict[str, Tensor]) -> int:
    return batch["input_ids"].shape[0]


@ranks(1, 2)
@pytest.mark.parametrize(
    ("tokens_of", "per_sample"),
    [("input_ids", LENGTH), (unmasked, LENGTH - PADDING), (rows, 1)],
    ids=["an entry", "a mask", "a function"],
)
def test_records_hold_the_tokens_of_all_ranks(tmp_path: Path, tokens_of, per_sample):
    runner = train(tmp_path, tokens_of)
    if get_rank() == 0:
        written = records(runner)
        assert len(written) == 6
        for record in written:  # also of the last batches, of which one rank repeats another's
            assert record["tokens_per_second"] / record["samples_per_second"] == pytest.approx(per_sample)
        log = (runner.run_dir / "log.txt").read_text()
        assert ("samples/s" in log) == (per_sample != 1)  # what counts samples says them once
        assert "tokens/s" in log
        assert "MFU " in log


@ranks(2)
def test_a_batch_that_counts_for_nothing_has_no_tokens(tmp_path: Path):
    data = {"dataset": TEXT[:3], "batch_size": 1, "sampler": {"type": "DefaultSampler", "round_up": False}}
    runner = train(tmp_path, "input_ids", train_dataloader=data)
    tokens = runner.message_hub.get_scalar("amounts/tokens").data[0]
    assert tokens == ([LENGTH, LENGTH] * 2 if get_rank() == 0 else [LENGTH, 0] * 2)


def test_a_model_may_return_values_of_these_names(tmp_path: Path):
    class Named(Language):
        def forward(self, **batch: Tensor) -> dict[str, Tensor]:
            loss = super().forward(**batch)
            return {"loss": loss, "tokens": loss.new_tensor(3.0), "flops": loss.new_tensor(5.0)}

    runner = train(tmp_path, "input_ids", kind=Named)
    for record in records(runner):
        assert (record["tokens"], record["flops"]) == (3.0, 5.0)
        assert record["tokens_per_second"] / record["samples_per_second"] == pytest.approx(LENGTH)


def test_a_loop_by_hand(tmp_path: Path):
    session = Session(tmp_path, default_hooks={"timer": {"tokens_of": "input_ids"}}, log_level="ERROR")
    model = Language()
    data = torch.utils.data.DataLoader(TEXT, batch_size=6)
    model, _, loader = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), data)
    for _ in session.epochs(1):
        for batch in loader:
            session.step(model(**batch))
    (record,) = [record for record in records(session) if record["mode"] == "epoch"]
    assert record["tokens_per_second"] / record["samples_per_second"] == pytest.approx(LENGTH)


def test_without_tokens_there_are_none(tmp_path: Path):
    runner = train(tmp_path, None)
    assert not any("tokens_per_second" in record for record in records(runner))


@pytest.mark.parametrize(
    ("tokens_of", "error", "says"),
    [
        ("tokens", ConfigError, "which has input_ids, attention_mask, labels, but is 'tokens'"),
        (lambda batch: "many", TypeError, "`amounts/tokens` must be a number .* but is 'many'"),
        (lambda batch: batch["labels"], TypeError, "`amounts/tokens` must be a number .* but is of shape"),
    ],
)
def test_what_is_no_number_is_refused(tmp_path: Path, tokens_of, error, says):
    with pytest.raises(error, match=says):
        train(tmp_path, tokens_of)


def test_batches_without_names_need_a_function(tmp_path: Path):
    runner = make_runner(tmp_path, [], default_hooks={"timer": {"tokens_of": "input_ids"}})
    with pytest.raises(ConfigError, match=r"must name a tensor in the batch, which is a list, .* also be a function"):
        runner.train()


def test_wrong_options_are_refused():
    with pytest.raises(ConfigError, match=r"`tokens_of` must be a function of a batch, the name .* but is 5"):
        IterTimerHook(tokens_of=5)


class Clock:
    """Stands for the time of the host, which only the test lets pass."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        for module in (timer, loops, own_loop):
            monkeypatch.setattr(module, "perf_counter", lambda: self.now)

    def passes(self, seconds: float) -> None:
        self.now += seconds


class Sleepy(Hook):
    """Takes long after each iteration, when the timer has ended it."""

    def __init__(self, priority: int, clock: Clock) -> None:
        self.priority, self.clock = priority, clock

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None) -> None:
        self.clock.passes(2.0)


@pytest.mark.parametrize("priority", [55, 65, 95], ids=["before the record", "after it", "last"])
def test_what_hooks_do_is_no_wait_for_data(tmp_path: Path, monkeypatch, priority: int):
    hooks = {"checkpoint": None, "logger": {"interval": 4}}
    runner = make_runner(tmp_path, [Sleepy(priority, Clock(monkeypatch))], default_hooks=hooks)
    runner.train()
    hub = runner.message_hub
    assert hub.get_scalar("train/time").data[0] == [0.0, 2.0, 2.0, 2.0] * 2  # the first of an epoch follows no hook
    assert hub.get_scalar("train/data_time").data[0] == [0.0] * 8


@pytest.mark.parametrize("records_metrics", [False, True])
def test_an_evaluation_within_an_iteration_is_not_timed(tmp_path: Path, monkeypatch, records_metrics: bool):
    clock = Clock(monkeypatch)
    session = Session(tmp_path, log_level="ERROR")
    model = Language()
    data = torch.utils.data.DataLoader(TEXT, batch_size=6)
    model, _, _ = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), data)
    held_out = session.prepare_evaluation(data)
    for batch in session.iterations(3):
        clock.passes(2.0)
        session.step(model(**batch))
        for _ in held_out:
            clock.passes(50.0)
        if records_metrics:
            session.log_metrics(loss=1.0)
    hub = session.run.message_hub
    assert hub.get_scalar("train/time").data[0] == [2.0] * 3
    assert hub.get_scalar("train/data_time").data[0] == [0.0] * 3


def test_an_evaluation_between_iterations_is_not_timed(tmp_path: Path, monkeypatch):
    clock = Clock(monkeypatch)

    class Passing(Hook):
        def before_train_epoch(self, runner) -> None:
            clock.passes(20.0)

        def before_train_iter(self, runner, batch_idx, data_batch=None) -> None:
            clock.passes(2.0)

        def after_val_epoch(self, runner, metrics=None) -> None:
            clock.passes(30.0)

        def after_val_iter(self, runner, batch_idx, data_batch=None, outputs=None) -> None:
            clock.passes(50.0)

    data = {"dataset": TEXT, "batch_size": 6}
    runner = train(
        tmp_path, None, custom_hooks=[Passing()], val_dataloader=data, train_cfg={"max_iters": 3, "val_interval": 1}
    )
    hub = runner.message_hub
    assert hub.get_scalar("train/time").data[0] == [22.0, 2.0, 2.0]
    assert hub.get_scalar("train/data_time").data[0] == [0.0] * 3
