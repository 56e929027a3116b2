"""The default hooks."""

from __future__ import annotations

import json
import math
import re
import shutil
from io import StringIO
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lockstep.checkpoint import is_checkpoint, read_meta, saving
from lockstep.dataset import batch_size_of
from lockstep.dist import all_gather_object, get_rank
from lockstep.errors import ConfigError
from lockstep.evaluator import BaseMetric
from lockstep.hooks import EarlyStoppingHook, Hook, HookList, ProgressHook
from lockstep.logging import HistoryBuffer, JsonLinesSink, MessageHub
from lockstep.runner import Runner
from lockstep.runner.run import TrainRun
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
        value = self.values.pop(0)
        return {"other": 0.0} if value is None else {self.name: value}


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
        ({"interval": 2, "save_begin": 1}, ["epoch_1", "epoch_3", "epoch_4"]),
        ({"interval": 3, "filename_tmpl": "after_{}.pth"}, ["after_3.pth", "after_4.pth"]),
        ({"interval": 3, "filename_tmpl": "{net}_{}"}, ["{net}_3", "{net}_4"]),
        ({"type": "CheckpointHook"}, ["epoch_1", "epoch_2", "epoch_3", "epoch_4"]),
        ({"type": "CheckpointHook", "max_keep_ckpts": 2, "async_save": True}, ["epoch_3", "epoch_4"]),
        ({"by_epoch": False}, ["iter_8"]),
        ({"type": "CheckpointHook", "by_epoch": False}, ["iter_8"]),
    ],
)
def test_checkpoints_are_saved_and_removed_as_asked(tmp_path: Path, options, expected):
    runner = train(tmp_path / f"{len(expected)}{options}", options)
    if get_rank() == 0:
        assert saved(runner) == expected
        assert (runner.work_dir / "last_checkpoint").read_text().splitlines()[0].split("/")[1] == expected[-1]


class StopsAt(Hook):
    def __init__(self, iteration: int) -> None:
        self.iteration = iteration

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        runner.train_loop.stop_training |= runner.iter + 1 == self.iteration


@ranks(2)
@pytest.mark.parametrize(
    ("options", "length", "expected"),
    [
        ({"interval": 3}, {}, ["epoch_2"]),
        ({"by_epoch": False, "interval": 2}, {"by_epoch": False, "max_iters": 9}, ["iter_2", "iter_3"]),
        ({}, {"by_epoch": False, "max_iters": 9}, ["iter_3"]),
        ({"interval": 2, "save_last": False}, {"by_epoch": False, "max_iters": 9}, ["iter_2"]),
    ],
)
def test_a_training_that_ends_early_is_saved_at_its_end(tmp_path: Path, options, length, expected):
    length = length or {"max_epochs": 4}
    runner = train(tmp_path, options, train_cfg=length, custom_hooks=[StopsAt(3)])
    if get_rank() == 0:
        assert saved(runner) == expected
    resumed = train(tmp_path, options, train_cfg=length, resume=True)
    last = runner.max_epochs or runner.max_iters
    assert get_rank() > 0 or options.get("save_last") is False or saved(resumed)[-1].endswith(f"_{last}")


def test_a_hook_serves_one_runner_alone(tmp_path: Path):
    hook = EarlyStoppingHook("accuracy")
    train(tmp_path, metric=Scripted("accuracy", [1.0] * 4), custom_hooks=[hook])
    with pytest.raises(RuntimeError, match=r"this EarlyStoppingHook has served another Runner already, .* for each"):
        train(tmp_path, metric=Scripted("accuracy", [1.0] * 4), custom_hooks=[hook])
    data = {"dataset": TensorDataset(torch.ones(8)), "batch_size": 2}
    runner = Runner(Net(), tmp_path, train_dataloader=data, custom_hooks=[StopsAt(2)], val_dataloader=data,
                    val_evaluator=Scripted("accuracy", [1.0] * 9))  # fmt: skip
    runner.val()
    runner.train()  # is another run of the same one


@pytest.mark.parametrize(
    ("name", "rule", "values", "best"),
    [
        ("accuracy", None, [1.0, 3.0, 2.0, 3.0], 2),
        ("val/loss", None, [3.0, 1.0, 2.0, math.nan], 2),
        ("strangeness", "less", [3.0, 2.0, 4.0, 1.0], 4),
        ("top1_error", None, [1.0, 2.0, 3.0, 4.0], 1),
        ("accuracy", None, [math.nan, 0.5, 0.7, 0.6], 3),
        ("accuracy", None, [math.inf, 0.5, 0.7, 0.6], 3),
        ("val/loss", None, [math.nan, -math.inf, 0.7, 0.6], 4),
        ("accuracy", None, [0.5, None, 0.7, 0.6], 3),
    ],
)
def test_the_best_checkpoint_is_kept(tmp_path: Path, name, rule, values, best):
    options = {"interval": -1, "save_last": False, "save_best": name, "rule": rule}
    runner = train(tmp_path, options, Scripted(name, list(values)))
    assert saved(runner) == [f"best_{name.replace('/', '_')}_epoch_{best}"]


def test_several_metrics_have_a_best_checkpoint_each(tmp_path: Path):
    class Both(Scripted):
        def compute_metrics(self, results: list[Any]) -> dict[str, float]:
            return {"accuracy": self.values.pop(0), "strangeness": self.values.pop(0)}

    options = {
        "interval": -1,
        "save_best": ["accuracy", "strangeness"],
        "rule": ["greater", "less"],
        "save_last": False,
    }
    runner = train(tmp_path, options, Both("", [1, 9, 3, 8, 2, 5, 0, 7]))
    assert saved(runner) == ["best_accuracy_epoch_2", "best_strangeness_epoch_3"]
    hub = runner.message_hub
    assert hub.get_info("best_score_accuracy") == 3
    assert hub.get_info("best_ckpt_strangeness") == str(runner.run_dir / "best_strangeness_epoch_3")
    assert runner.best_checkpoint == runner.run_dir / "best_accuracy_epoch_2"
    shutil.rmtree(runner.best_checkpoint)
    assert runner.best_checkpoint is None  # and not that by another metric


def test_metrics_whose_names_differ_in_a_slash_share_a_best_checkpoint(tmp_path: Path):
    class Both(Scripted):
        def compute_metrics(self, results: list[Any]) -> dict[str, float]:
            return {"top/1": self.values.pop(0), "top_1": self.values.pop(0)}

    options = {"interval": -1, "save_best": ["top/1", "top_1"], "rule": "greater", "save_last": False}
    runner = train(tmp_path, options, Both("", [1, 9, 3, 8, 2, 5, 0, 7]))
    assert saved(runner) == ["best_top_1_epoch_1", "best_top_1_epoch_2"]


def test_a_best_checkpoint_that_fails_is_not_the_best_and_leaves_those_by_other_metrics(tmp_path: Path):
    class Both(Scripted):
        def compute_metrics(self, results: list[Any]) -> dict[str, float]:
            return {"accuracy": self.values.pop(0), "strangeness": self.values.pop(0)}

    def fails(plan: Any) -> Any:
        if "best_accuracy_epoch_2" in str(plan.path) or "best_accuracy_epoch_4" in str(plan.path):
            raise OSError("the disk is broken")
        return write(plan)

    write = saving.write_share
    options = {
        "interval": -1,
        "save_best": ["accuracy", "strangeness"],
        "rule": ["greater", "less"],
        "save_last": False,
        "async_save": True,
        "on_save_error": "warn",
    }
    with patch.object(saving, "write_share", fails):
        runner = train(tmp_path, options, Both("", [1, 9, 3, 8, 2, 5, 4, 7]))
    assert saved(runner) == ["best_accuracy_epoch_3", "best_strangeness_epoch_3"]
    assert runner.message_hub.get_info("best_score_accuracy") == 2
    assert runner.message_hub.get_info("best_ckpt_accuracy") == str(runner.run_dir / "best_accuracy_epoch_3")


def test_what_is_no_number_is_not_the_best_and_a_single_metric_needs_no_name(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"`save_best` must be 'auto' only where a metric .* none of words is"):
        train(tmp_path / "auto", {"save_best": "auto"}, Scripted("words", ["a"]))
    runner = train(tmp_path / "one", {"save_best": ["accuracy"]}, Scripted("accuracy", [1, 2, 3, 4]))
    assert runner.message_hub.get_info("best_score") == 4


def test_parts_of_names_may_tell_the_rule(tmp_path: Path):
    options = {"save_best": "strangeness", "greater_keys": ["x"], "less_keys": ["Strange"]}
    assert "best_strangeness_epoch_3" in saved(train(tmp_path, options, Scripted("strangeness", [3, 2, 1, 5])))
    options = {"save_best": "strangeness", "greater_keys": "strange", "less_keys": "loss"}  # one part, not its letters
    assert "best_strangeness_epoch_4" in saved(train(tmp_path / "one", options, Scripted("strangeness", [3, 2, 1, 5])))


@ranks(1, 2)
def test_checkpoints_may_go_elsewhere(tmp_path: Path):
    options = {"out_dir": str(tmp_path / "store"), "max_keep_ckpts": 1, "save_best": "accuracy"}
    runner = train(tmp_path / "exp", options, Scripted("accuracy", [1, 2, 1, 1]), train_cfg={"max_epochs": 3})
    folder = tmp_path / "store" / "exp" / runner.run_dir.name
    all_gather_object(None)
    assert sorted(path.name for path in folder.iterdir()) == ["best_accuracy_epoch_2", "epoch_3"]
    assert saved(runner) == []
    assert runner.message_hub.get_info("last_ckpt") == str(folder / "epoch_3")
    again = train(tmp_path / "exp", options, Scripted("accuracy", [1, 1]), resume=True)
    assert again.epoch == 4
    assert "epoch_4" in {path.name for path in (folder.parent / again.run_dir.name).iterdir()}


@ranks(2)
def test_the_optimizer_may_be_left_out(tmp_path: Path):
    train(tmp_path, {"save_optimizer": False}, train_cfg={"max_epochs": 3})
    optim_wrapper = {"optimizer": {"type": "AdamW", "lr": 0.0}}
    again = train(tmp_path, {"save_optimizer": False}, resume=True, optim_wrapper=optim_wrapper)
    (state,) = {int(state["step"]) for state in again.optim_wrapper.optimizer.state.values()}
    assert (again.epoch, state) == (4, 2)  # of the last epoch alone
    if get_rank() == 0:
        assert "was saved without the optimizer's state, which begins anew" in (again.run_dir / "log.txt").read_text()


class Saving(Hook):
    """Saves in the way of a user of MMEngine."""

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None) -> None:
        if runner.iter == 2:
            runner.save_checkpoint(runner.work_dir, "mine", meta={"note": "here"}, is_last=False)

    def after_train_epoch(self, runner) -> None:
        runner.save_checkpoint(str(runner.work_dir), f"end_{runner.epoch + 1}")

    def after_val_epoch(self, runner, metrics=None) -> None:
        runner.save_checkpoint("validated")


@ranks(1, 2)
def test_hooks_may_save_when_and_where_they_want(tmp_path: Path):
    runner = train(tmp_path, {"interval": -1, "save_last": False}, Scripted("accuracy", [1.0] * 2),
                   train_cfg={"max_epochs": 2}, custom_hooks=[Saving()])  # fmt: skip
    place = [
        (meta["epoch"], meta["iter"], meta["position"]["batches"])
        for folder in (tmp_path / "mine", tmp_path / "end_1", tmp_path / "end_2", runner.run_dir / "validated")
        for meta in [read_meta(folder)]
    ]
    length = runner.max_iters // 2
    assert place == [(*divmod(3, length)[:1], 3, 3 % length), (1, length, 0), (2, 2 * length, 0), (2, 2 * length, 0)]
    assert read_meta(tmp_path / "mine")["note"] == "here"
    with pytest.raises(ConfigError, match="`on_save_error` must be 'raise' or 'warn', but is 'wran'"):
        runner.save_checkpoint("mine", on_save_error="wran")


def test_a_validation_without_a_training_saves_and_stops_nothing(tmp_path: Path):
    data = {"dataset": TensorDataset(torch.ones(4, 1)), "batch_size": 2}
    stopping = {"type": "EarlyStoppingHook", "monitor": "accuracy", "stopping_threshold": 0.5}
    runner = Runner(Net(), tmp_path, val_dataloader=data, val_evaluator=Scripted("accuracy", [1.0]),
                    default_hooks={"checkpoint": {"save_best": "auto"}}, custom_hooks=[stopping])  # fmt: skip
    assert runner.val() == {"accuracy": 1.0}
    assert saved(runner) == []


def test_a_run_that_goes_on_makes_up_for_the_validation_that_was_not_saved(tmp_path: Path):
    train(tmp_path, {"save_best": "accuracy"}, Scripted("accuracy", [5.0, 9.0]), train_cfg={"max_epochs": 2})
    again = train(tmp_path, {"save_best": "accuracy"}, Scripted("accuracy", [9.0, 8.0, 7.0]), resume=True)
    assert saved(again) == ["best_accuracy_epoch_2", "epoch_3", "epoch_4"]


def test_a_run_that_goes_on_remembers_what_was_best(tmp_path: Path):
    options = {"save_best": "auto"}
    first = train(tmp_path, options, Scripted("accuracy", [5.0, 9.0]), train_cfg={"max_epochs": 2})
    metric = Scripted("accuracy", [8.0, 7.0])
    second = train(tmp_path, options, metric, load_from=first.run_dir / "best_accuracy_epoch_2", resume=True)
    assert saved(first) == ["best_accuracy_epoch_2", "epoch_1", "epoch_2"]
    assert saved(second) == ["epoch_3", "epoch_4"]


@pytest.mark.parametrize("other_first", [False, True])
def test_what_was_best_is_kept_beside_a_second_hook_that_saves_by_iterations(tmp_path: Path, other_first: bool):
    options = {"save_best": "accuracy"}
    priority = "LOW" if other_first else "LOWEST"
    more = {"custom_hooks": [{"type": "CheckpointHook", "interval": 3, "by_epoch": False, "priority": priority}]}
    first = train(tmp_path, options, Scripted("accuracy", [5.0, 6.0]), train_cfg={"max_epochs": 2}, **more)
    assert first.best_checkpoint == first.run_dir / "best_accuracy_epoch_2"
    metric = Scripted("accuracy", [6.0, 4.0, 9.0])  # the first one makes up for that which followed the checkpoint
    resumed = {**more, "load_from": first.run_dir / "epoch_2", "resume": True}
    second = train(tmp_path, options, metric, **resumed, train_cfg={"max_epochs": 4})
    assert [name for name in saved(second) if "best" in name] == ["best_accuracy_epoch_4"]
    for name in ("epoch_4", "iter_15"):
        [best] = read_meta(second.run_dir / name)["checkpoint_hook"]["best"].values()
        assert best["value"] == 6.0


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"save_best": "loss"}, r"but is 'loss'. Known: `strangeness`. The loss is one if .* loss=lambda outputs"),
        ({"save_best": "acc"}, "must be a metric of the validation, but is 'acc'. Known: `strangeness`"),
        ({"save_best": "auto"}, "`rule` must be 'greater' or 'less' for the metric 'strangeness'"),
        ({"save_best": ["auto", "accuracy"]}, "`rule` must be 'greater' or 'less' for the metric 'auto'"),
        ({"rule": "more"}, "`rule` must be.*'more'"),
        ({"max_keep_ckpts": 0}, "at least 1, or -1 for all, but is 0"),
        ({"max_keep_ckpts": "3"}, "`max_keep_ckpts` must be an int of at least -1, but is '3'"),
        ({"interval": "1e3"}, "`interval` must be an int of at least -1, but is '1e3'"),
        ({"save_begin": "1e3"}, "`save_begin` must be an int of at least 0, but is '1e3'"),
        ({"rule": ["less", "greater"], "save_best": "a"}, "one of them for each of 1 metrics in `save_best`, but is"),
        ({"filename_tmpl": "../epoch_{}"}, "`filename_tmpl` must be the name of a folder in the run's"),
        ({"filename_tmpl": "last.pth"}, "`filename_tmpl` must have one {} for the number, but is 'last.pth'"),
    ],
)
def test_wrong_checkpoint_options_are_refused(tmp_path: Path, options, says):
    with pytest.raises(ConfigError, match=says):
        train(tmp_path, options, Scripted("strangeness", [1.0] * 4))


def test_a_metric_of_several_numbers_has_no_best(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"with one number, but 'accuracy' is \[0.5, 0.7\]"):
        train(tmp_path, {"save_best": "accuracy"}, Scripted("accuracy", [[0.5, 0.7]]))


def test_checkpoints_by_epoch_need_epochs(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"CheckpointHook\(by_epoch=False"):
        train(tmp_path, {"type": "CheckpointHook", "by_epoch": True}, train_cfg={"max_iters": 2})
    typed = train(tmp_path / "typed", {"type": "CheckpointHook"}, train_cfg={"max_iters": 3, "val_interval": 2})
    assert saved(typed) == ["iter_2", "iter_3"]
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


def shown_on(console: Console, hook: ProgressHook, run: TrainRun) -> str:
    """Run the hook again over a run that is over, on another console."""
    run.console = console
    run.train_loop.epoch, run.train_loop.iter = 1, 4
    hooks = HookList([hook])
    hooks.call("before_train", run)
    hooks.call("before_train_epoch", run)
    run.train_loop.iter = 6
    hook._due = 0.0
    for index in (1, 2):  # the loss is begun to be read in one iteration, and shown in the next
        hooks.call("after_train_iter", run, batch_idx=index, data_batch=None, outputs=None)
    hooks.close()
    return console.file.getvalue()


def test_a_terminal_shows_a_live_bar(tmp_path: Path):
    runner = train(tmp_path)
    file = StringIO()
    file.isatty = lambda: True
    console = Console(file=file, width=100, color_system=None, legacy_windows=False)
    shown = shown_on(console, ProgressHook(), runner.run)
    assert re.search(r"epoch 2/4 ━.*3/4 loss \d\.\d{4}  ETA 0:00:00  [\d,]+ samples/s", shown)
    assert shown.endswith("\x1b[1A\x1b[2K")  # the bar is taken away at the end


def test_a_log_shows_plain_lines(tmp_path: Path):
    runner = train(tmp_path)
    console = Console(file=StringIO(), width=40, color_system=None)
    shown = shown_on(console, ProgressHook(period_seconds=0), runner.run)
    assert re.fullmatch(r"epoch 2/4  3/4  loss \d\.\d{4}  ETA 0:00:00  [\d,]+ samples/s\n", shown)
    assert "\x1b" not in shown


def test_a_test_and_a_prediction_show_how_far_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    data, lines = {"dataset": TensorDataset(torch.ones(8)), "batch_size": 4}, {"progress": {"period_seconds": 0.0}}
    scripted = Scripted("accuracy", [0.5, 0.5])
    runner = train(tmp_path, test_dataloader=data, test_evaluator=scripted, default_hooks=lines)
    for evaluate, label in ((runner.test, "testing"), (runner.predict, "predicting"), (runner.test, "testing")):
        capsys.readouterr()
        evaluate()
        shown = "".join(capsys.readouterr())
        assert re.findall(r"^(.*)/2\b(.*)$", shown, re.M) == [(f"{label}  1", ""), (f"{label}  2", "")]


def test_the_line_of_an_epoch_shows_the_metrics_of_its_own_validation(tmp_path: Path):
    runner = train(tmp_path, metric=Scripted("a  b", [0.25, 0.5]), train_cfg={"max_epochs": 4, "val_interval": 2})
    log = (runner.run_dir / "log.txt").read_text()
    lines = [line for line in log.splitlines() if re.search(r"epoch \d/4 .*loss", line)]
    assert [re.findall(r"val/a  b \S+", line) for line in lines] == [[], ["val/a  b 0.25"], [], ["val/a  b 0.5"]]


def test_an_epoch_that_was_resumed_in_its_middle_says_where(tmp_path: Path):
    options = {"by_epoch": False, "interval": 3, "max_keep_ckpts": -1}
    first = train(tmp_path, options, train_cfg={"max_epochs": 2})
    again = train(tmp_path, options, train_cfg={"max_epochs": 2}, load_from=first.run_dir / "iter_3", resume=True)
    log = (again.run_dir / "log.txt").read_text()
    assert re.search(r"epoch \d/2 \(resumed after iteration 3\)  loss", log)
    assert "(resumed" not in (first.run_dir / "log.txt").read_text()


def test_an_epoch_that_was_resumed_at_its_end_has_no_line(tmp_path: Path):
    options = {"by_epoch": False, "interval": 4, "max_keep_ckpts": -1}
    first = train(tmp_path, options, train_cfg={"max_epochs": 2})
    again = train(tmp_path, options, train_cfg={"max_epochs": 2}, load_from=first.run_dir / "iter_4", resume=True)
    lines = re.findall(r"epoch (\d)/2  ?(.*)", (again.run_dir / "log.txt").read_text())
    assert [number for number, _ in lines] == ["2"], lines


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
