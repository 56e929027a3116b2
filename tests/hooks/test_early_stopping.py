"""Training ends where it does not help any more, on all ranks alike."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lockstep import Session
from lockstep.dist import all_gather_object
from lockstep.errors import ConfigError
from lockstep.evaluator import Accuracy
from lockstep.hooks import EarlyStoppingHook, Hook
from lockstep.testing import ranks

from .runs import Scripted, make_runner

TEN = {"train_cfg": {"max_epochs": 10}}


def epochs_until_it_stops(work_dir: Path, values: list[float], name: str = "accuracy", **options: Any) -> int:
    hook = {"type": "EarlyStoppingHook", "monitor": name, **options}
    runner = make_runner(work_dir, [hook], Scripted(list(values), name), default_hooks={"checkpoint": None}, **TEN)
    runner.train()
    return runner.epoch


@ranks(2)
@pytest.mark.parametrize(
    ("values", "options", "epochs"),
    [
        ([1, 2, 3, 4, 5, 6, 7, 8, 9, 10], {"patience": 1}, 10),
        ([5, 4, 6, 6.05, 6.1, 9], {"patience": 2}, 5),
        ([5, 4, 6, 6.05, 6.1, 6.2], {"patience": 2, "min_delta": 0}, 10),
        ([5, 4, 3], {"patience": 2, "rule": "greater"}, 3),
        ([1, math.nan], {}, 2),
        ([1, math.inf], {}, 2),
        ([1, math.nan, math.nan], {"check_finite": False, "patience": 2}, 3),
        ([math.nan, 1, 2, 1, 1], {"check_finite": False, "patience": 2}, 5),
        ([math.nan, math.nan], {"check_finite": False, "patience": 2}, 2),
        ([1, 5, 9.5], {"stopping_threshold": 9}, 3),
        ([9, 5, 1], {"rule": "less", "stopping_threshold": 2}, 3),
        ([0.9, 0.5, 0.3, 0.29, 0.28], {"rule": "less", "patience": 2}, 5),
    ],
)
def test_it_stops_when_patience_is_over(tmp_path: Path, values, options, epochs):
    values = [*values, *(values[-1] + step for step in range(1, 11))] if epochs == 10 else values
    stopped = epochs_until_it_stops(tmp_path, values, **options)
    assert all_gather_object(stopped) == [epochs] * len(all_gather_object(None))


def test_the_name_of_the_metric_tells_the_rule(tmp_path: Path):
    assert epochs_until_it_stops(tmp_path, [1.0, 2.0, 3.0], "val/loss", patience=2) == 3
    with pytest.raises(ConfigError, match="`rule` must be 'greater' or 'less' for the metric 'strangeness'"):
        EarlyStoppingHook("strangeness")


def test_a_metric_that_is_not_one_number_is_refused_by_name(tmp_path: Path):
    with pytest.raises(
        ConfigError, match=r"`monitor` must be a metric with one number, but 'accuracy' is \[0.5, 0.7\]"
    ):
        epochs_until_it_stops(tmp_path, [[0.5, 0.7]])


def test_iterations_stop_as_epochs_do(tmp_path: Path):
    hook = EarlyStoppingHook("accuracy", patience=2)
    runner = make_runner(tmp_path, [hook], Scripted([3.0, 2.0, 1.0]), train_cfg={"max_iters": 30, "val_interval": 3})
    runner.train()
    assert runner.iter == 9
    reason = (
        "training stops early: accuracy has not improved on its best, 3, by more than 0.1 (min_delta) in 2 validations"
    )
    runner.val_loop.evaluator.metrics[0].values.append(0.0)
    runner.val()  # after the training: nothing stops any more
    assert (runner.run_dir / "log.txt").read_text().count(reason.partition(":")[0]) == 1
    assert reason in (runner.run_dir / "log.txt").read_text()


class Sometimes(Scripted):
    """Has its metric only in the first validation."""

    def compute_metrics(self, results) -> dict[str, float]:
        found = super().compute_metrics(results)
        return found if found["accuracy"] == 9 else {"other": 1.0}


@ranks(2)
def test_a_metric_that_no_validation_has_is_refused_after_the_first(tmp_path: Path):
    runner = make_runner(tmp_path, [EarlyStoppingHook("acuracy", rule="greater")], Scripted([1.0] * 2))
    with pytest.raises(ConfigError, match="metric of the validation, but is 'acuracy': did you mean `accuracy`"):
        runner.train()
    assert runner.epoch == 1


def test_a_metric_that_a_later_validation_lacks_is_told_or_refused(tmp_path: Path):
    runner = make_runner(tmp_path, [EarlyStoppingHook("accuracy", patience=1)], Sometimes([9.0, 1.0]))
    runner.train()
    assert runner.epoch == 2
    says = "`monitor` must be a metric of each validation, but is 'accuracy'. This one has: other"
    assert says in (runner.run_dir / "log.txt").read_text()
    with pytest.raises(ConfigError, match=says):
        make_runner(tmp_path, [EarlyStoppingHook("accuracy", strict=True)], Sometimes([9.0, 1.0])).train()


@ranks(1)
@pytest.mark.parametrize("metric", [Accuracy(), None])
def test_a_metric_that_there_cannot_be_is_refused_before_training(metric, tmp_path: Path):
    says = "did you mean `accuracy`" if metric else "but nothing is validated. Give `val_dataloader`"
    hook = EarlyStoppingHook("acuracy", rule="greater")
    for options in ({}, {"default_hooks": {"checkpoint": {"save_best": "acuracy"}}}):
        runner = make_runner(tmp_path, [] if options else [hook], metric, **options)
        with pytest.raises(ConfigError, match=says):
            runner.train()
        assert runner.iter == 0


class Stop(Hook):
    priority = "LOWEST"

    def __init__(self, after: int) -> None:
        self.after = after

    def after_train_epoch(self, runner) -> None:
        if runner.epoch + 1 == self.after:
            raise KeyboardInterrupt


@ranks(1, 2)
def test_a_run_that_goes_on_is_as_impatient_as_one_that_was_never_interrupted(tmp_path: Path):
    values = [9.0, 1.0, 2.0, 3.0]
    with pytest.raises(KeyboardInterrupt):
        make_runner(tmp_path, [EarlyStoppingHook("accuracy", patience=3), Stop(3)], Scripted(values[:2]), **TEN).train()
    hook = EarlyStoppingHook("accuracy", patience=3)
    # The third epoch was saved and not validated, which is made up for.
    runner = make_runner(tmp_path, [hook], Scripted(values[2:]), resume=True, **TEN)
    runner.train()
    assert runner.epoch == epochs_until_it_stops(tmp_path / "whole", values, patience=3) == 4
    assert (hook.best, hook.wait_count) == (9.0, 3)


def test_each_metric_has_its_own_best_value_in_a_checkpoint(tmp_path: Path):
    class Two(Scripted):
        def compute_metrics(self, results: list[Any]) -> dict[str, float]:
            return {**super().compute_metrics(results), "mAP": 0.5}

    def hooks() -> list[EarlyStoppingHook]:
        return [EarlyStoppingHook("mAP", rule="greater", patience=3), EarlyStoppingHook("accuracy", patience=3)]

    make_runner(tmp_path, hooks(), Two([8.0, 9.0]), train_cfg={"max_epochs": 2}).train()
    again = hooks()
    make_runner(tmp_path, again, Two([9.0, 10.0, 11.0]), resume=True, train_cfg={"max_epochs": 3}).train()
    assert [(hook.best, hook.wait_count) for hook in again] == [(0.5, 2), (10.0, 0)]


def test_the_best_checkpoint_knows_of_the_validation_that_made_it(tmp_path: Path):
    values, best = [5.0, 9.0, 6.0, 6.0, 6.0], {"checkpoint": {"save_best": "accuracy"}}
    hook = EarlyStoppingHook("accuracy", patience=2)
    make_runner(tmp_path, [hook], Scripted(list(values)), default_hooks=best, **TEN).train()
    again = EarlyStoppingHook("accuracy", patience=2)
    from_best = {"resume": True, "load_from": next(tmp_path.glob("*/best_accuracy_epoch_2"))}
    runner = make_runner(tmp_path / "again", [again], Scripted(values[2:]), default_hooks=best, **from_best, **TEN)
    runner.train()
    assert runner.epoch == 4
    assert (again.best, again.wait_count) == (hook.best, hook.wait_count) == (9.0, 2)


def test_a_run_that_has_stopped_stops_again(tmp_path: Path):
    make_runner(tmp_path, [EarlyStoppingHook("accuracy", patience=1)], Scripted([9.0, 1.0]), **TEN).train()
    again = make_runner(tmp_path, [EarlyStoppingHook("accuracy", patience=1)], Scripted([1.0]), resume=True, **TEN)
    again.train()
    assert again.epoch == 2


@ranks(1, 2)
@pytest.mark.parametrize("options", [{"patience": 1}, {"stopping_threshold": 0.5, "rule": "less"}], ids=str)
@pytest.mark.parametrize("kind", ["epochs", "iterations"])
def test_a_session_that_has_stopped_stops_again(kind: str, options: dict[str, Any], tmp_path: Path):
    """With a schedule, the last checkpoint is saved after the validation that has stopped it."""

    def trained() -> tuple[int, float]:
        hook = {"type": "EarlyStoppingHook", "monitor": "loss", **options}
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        with Session(tmp_path, resume=True, custom_hooks=[hook], log_level="ERROR") as session:
            model, optimizer, loader = session.prepare(
                model, optimizer, DataLoader(torch.ones(4, 1)), schedulers=schedule
            )
            for _ in session.epochs(9) if kind == "epochs" else range(1):
                for index, batch in enumerate(loader if kind == "epochs" else session.iterations(9)):
                    session.step(model(batch).sum())
                    if kind == "iterations" and index % 2:
                        session.log_metrics(loss=1.0 if session.iter < 2 else 0.4 if len(options) > 1 else 2.0)
                if kind == "epochs":
                    session.log_metrics(loss=1.0 if session.epoch < 2 else 0.4 if len(options) > 1 else 2.0)
                    schedule.step()
            return session.iter, optimizer.param_groups[0]["lr"]

    once = trained()
    assert once[0] < 9
    assert [trained(), trained()] == [once, once]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"rule": "more"}, "`rule` must be 'greater', 'less' or None, but is 'more'"),
        ({"patience": 0}, "`patience` must be an int of at least 1, but is 0"),
        ({"min_delta": -1}, "`min_delta` must be a finite number of at least 0, but is -1"),
        ({"min_delta": "1e-3"}, "`min_delta` must be a finite number of at least 0, but is '1e-3'"),
        ({"min_delta": math.nan}, "`min_delta` must be a finite number of at least 0, but is nan"),
        ({"stopping_threshold": "1e-3"}, "`stopping_threshold` must be a finite number, but is '1e-3'"),
    ],
)
def test_wrong_options_are_refused(options, says):
    with pytest.raises(ConfigError, match=says):
        EarlyStoppingHook("accuracy", **options)


def test_several_metrics_are_refused():
    with pytest.raises(TypeError, match=r"`monitor` must be the name of one metric, but is \['a', 'b'\] of type list"):
        EarlyStoppingHook(["a", "b"], rule="greater")
