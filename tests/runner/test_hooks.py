"""The default hooks."""

from __future__ import annotations

import json
import math
import re
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lockstep.checkpoint import is_checkpoint
from lockstep.dataset import batch_size_of
from lockstep.dist import get_rank
from lockstep.errors import ConfigError
from lockstep.evaluator import BaseMetric
from lockstep.hooks import HookList, ProgressHook
from lockstep.hooks.display import LiveDisplay, PlainDisplay
from lockstep.logging import HistoryBuffer, JsonLinesSink, MessageHub
from lockstep.runner import Runner
from lockstep.testing import ranks


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor, mode: str = "tensor"):
        return (self.scale * x).square().mean() if mode == "loss" else x


class Scripted(BaseMetric):
    """Yields a number of a list after each validation."""

    def __init__(self, name: str, values: list[float]) -> None:
        super().__init__()
        self.name, self.values = name, values

    def process(self, data_batch: Any, data_samples: Any) -> None:
        self.results.append(0)

    def compute_metrics(self, results: list[Any]) -> dict[str, float]:
        return {self.name: self.values.pop(0)}


def train(work_dir: Path, checkpoint: dict | None = None, metric: BaseMetric | None = None, **changes: Any) -> Runner:
    data = {"dataset": TensorDataset(torch.ones(8)), "batch_size": 2}
    validation = {} if metric is None else {"val_dataloader": data, "val_evaluator": metric}
    runner = Runner(
        **{
            "model": Net(),
            "work_dir": work_dir,
            "train_dataloader": data,
            "train_cfg": {"max_epochs": 4},
            "optim_wrapper": {"optimizer": {"type": "SGD", "lr": 0.1}, "clip_grad": {"max_norm": 0.5}},
            "default_hooks": {"checkpoint": checkpoint or {}},
            **validation,
            **changes,
        }
    )
    runner.train()
    return runner


def saved(runner: Runner) -> list[str]:
    return sorted(path.name for path in runner.run_dir.iterdir() if is_checkpoint(path))


@ranks(2)
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, ["epoch_1", "epoch_2", "epoch_3", "epoch_4"]),
        ({"interval": 3}, ["epoch_3", "epoch_4"]),
        ({"interval": 3, "save_last": False}, ["epoch_3"]),
        ({"interval": -1}, ["epoch_4"]),
        ({"max_keep_ckpts": 2}, ["epoch_3", "epoch_4"]),
        ({"by_epoch": False, "interval": 3}, ["iter_3", "iter_6", "iter_8"]),
    ],
)
def test_checkpoints_are_saved_and_removed_as_asked(tmp_path: Path, options, expected):
    runner = train(tmp_path / f"{len(expected)}{options}", options)
    if get_rank() == 0:
        assert saved(runner) == expected
        assert (runner.work_dir / "last_checkpoint").read_text().split("/")[1].strip() == expected[-1]


@pytest.mark.parametrize(
    ("name", "rule", "values", "best"),
    [
        ("accuracy", None, [1.0, 3.0, 2.0, 3.0], 2),
        ("val/loss", None, [3.0, 1.0, 2.0, math.nan], 2),
        ("strangeness", "less", [3.0, 2.0, 4.0, 1.0], 4),
        ("top1_error", None, [1.0, 2.0, 3.0, 4.0], 1),
    ],
)
def test_the_best_checkpoint_is_kept(tmp_path: Path, name, rule, values, best):
    options = {"interval": -1, "save_last": False, "save_best": name, "rule": rule}
    runner = train(tmp_path, options, Scripted(name, list(values)))
    assert saved(runner) == [f"best_{name.replace('/', '_')}_epoch_{best}"]


def test_a_run_that_goes_on_remembers_what_was_best(tmp_path: Path):
    options = {"save_best": "auto"}
    first = train(tmp_path, options, Scripted("accuracy", [5.0, 9.0]), train_cfg={"max_epochs": 2})
    metric = Scripted("accuracy", [8.0, 7.0])
    second = train(tmp_path, options, metric, load_from=first.run_dir / "best_accuracy_epoch_2", resume=True)
    assert saved(first) == ["best_accuracy_epoch_2", "epoch_1", "epoch_2"]
    assert saved(second) == ["epoch_3", "epoch_4"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"save_best": "acc"}, "one of the metrics strangeness, but is 'acc'"),
        ({"save_best": "auto"}, "`rule` must be 'greater' or 'less' for the metric 'strangeness'"),
        ({"rule": "more"}, "`rule` must be.*'more'"),
        ({"max_keep_ckpts": 0}, "at least 1, or -1 for all, but is 0"),
    ],
)
def test_wrong_checkpoint_options_are_refused(tmp_path: Path, options, says):
    with pytest.raises(ConfigError, match=says):
        train(tmp_path, options, Scripted("strangeness", [1.0] * 4))


def test_checkpoints_by_epoch_need_epochs(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"CheckpointHook\(by_epoch=False"):
        train(tmp_path, {"type": "CheckpointHook"}, train_cfg={"max_iters": 2})
    assert saved(train(tmp_path / "iters", train_cfg={"max_iters": 3, "val_interval": 2})) == ["iter_2", "iter_3"]


def test_a_default_hook_can_be_left_out(tmp_path: Path):
    hooks = dict.fromkeys(["timer", "logger", "progress", "checkpoint", "sync_buffers", "sampler_seed", "nan_check"])
    runner = train(tmp_path, default_hooks=hooks)
    assert [type(hook).__name__ for hook in runner.hooks.hooks] == ["ParamSchedulerHook"]
    assert not (runner.run_dir / "metrics.jsonl").exists()
    for left_out in hooks:
        train(tmp_path, default_hooks={left_out: None})


def test_the_gradient_norm_is_recorded(tmp_path: Path):
    runner = train(tmp_path)
    lines = (runner.run_dir / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert all(record["grad_norm"] > 0.5 for record in records if record["mode"] == "train")


def shown_on(console: Console, hook: ProgressHook, runner: Runner) -> str:
    """Run the hook again over a run that is over, on another console."""
    runner.console = console
    runner.train_loop.epoch, runner.train_loop.iter = 1, 4
    hooks = HookList([hook])
    hooks.call("before_train", runner)
    hooks.call("before_train_epoch", runner)
    runner.train_loop.iter = 6
    hooks.call("after_train_iter", runner, batch_idx=2, data_batch=None, outputs=None)
    hooks.close()
    return console.file.getvalue()


def test_a_terminal_shows_a_live_bar(tmp_path: Path):
    runner = train(tmp_path)
    console = Console(file=StringIO(), force_terminal=True, width=100, color_system=None)
    shown = shown_on(console, ProgressHook(), runner)
    assert re.search(r"epoch 2/4 ━.*3/4 loss \d\.\d{4}  [\d,]+ samples/s  ETA 0:00:00", shown)
    assert shown.endswith("\x1b[1A\x1b[2K")  # the bar is taken away at the end


def test_a_log_shows_plain_lines(tmp_path: Path):
    runner = train(tmp_path)
    console = Console(file=StringIO(), width=40, color_system=None)
    shown = shown_on(console, ProgressHook(period_seconds=0), runner)
    assert re.fullmatch(r"epoch 2/4  3/4  loss \d\.\d{4}  [\d,]+ samples/s  ETA 0:00:00\n", shown)
    assert "\x1b" not in shown


def test_lines_come_no_more_often_than_asked():
    console = Console(file=StringIO(), width=80)
    display = PlainDisplay(console, period_seconds=60)
    display.begin("epoch 1/2", None)
    for done in range(5):
        display.show(done, "loss 1")
    display.close()
    assert console.file.getvalue() == ""


def test_a_live_bar_can_be_shown_again_after_it_was_closed():
    console = Console(file=StringIO(), force_terminal=True, width=80)
    display = LiveDisplay(console)
    for label in ("training", "validating"):
        display.begin(label, 3)
        display.show(1, "text")
    display.close()
    display.begin("testing", 2)
    display.close()
    assert all(label in console.file.getvalue() for label in ("training", "validating", "testing"))


@ranks(2)
def test_only_rank_0_speaks(tmp_path: Path):
    runner = train(tmp_path)
    assert runner.console.quiet == (get_rank() != 0)
    assert any(isinstance(hook, ProgressHook) for hook in runner.hooks.hooks) == (get_rank() == 0)


@pytest.mark.parametrize(
    ("batch", "count"),
    [
        (torch.ones(5, 2), 5),
        ((torch.ones(5, 2), torch.ones(5)), 5),
        ({"img": torch.ones(4), "name": ["a"]}, 4),
        ({"imgs": [torch.ones(2), torch.ones(3), torch.ones(4)]}, 3),
        (torch.ones(()), 1),
        ("text", 1),
        ([], 1),
    ],
)
def test_samples_are_counted(batch, count):
    assert batch_size_of(batch) == count


def test_history_reads_numbers_and_tensors():
    buffer = HistoryBuffer(max_length=3)
    with pytest.raises(ValueError, match="is empty"):
        buffer.mean()
    for value in (9.0, 1.0, torch.tensor([2.0]), torch.tensor(3.0)):
        buffer.update(value)
    assert len(buffer) == 3
    assert (buffer.mean(), buffer.mean(2), buffer.current()) == (2.0, 2.5, 3.0)
    assert buffer.weighted_mean([1, 3]) == 2.75
    assert buffer.weighted_mean([5, 2, 0, 0]) == 1.0
    assert buffer.weighted_mean([0, 0]) == 0.0
    hub = MessageHub()
    hub.update_scalars({"train/loss": 2.0})
    assert hub.get_scalar("train/loss").current() == 2.0
    with pytest.raises(KeyError, match=r"train/los'; there are .*train/loss"):
        hub.get_scalar("train/los")


def test_records_are_json_whatever_they_hold(tmp_path: Path):
    sink = JsonLinesSink(tmp_path / "records.jsonl")
    sink.write({"loss": math.nan, "scale": -math.inf, "n": torch.tensor(3), "ids": (1, [2.5])})
    sink.close()
    sink.write({"where": tmp_path, "nested": {1: None}})
    sink.close()
    first, second = map(json.loads, sink.path.read_text().splitlines())
    assert first == {"loss": "nan", "scale": "-inf", "n": 3, "ids": [1, [2.5]]}
    assert second == {"where": str(tmp_path), "nested": {"1": None}}
