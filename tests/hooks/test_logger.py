"""Records are there in time, also those under way when a run fails."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lockstep.dist import get_rank
from lockstep.hooks import Hook, LoggerHook
from lockstep.runner import Runner
from lockstep.testing import RankFailure, ranks, run_ranks

from .runs import make_runner


class Failing(nn.Module):
    """Fails on every rank in the iteration after the second record."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.calls = 0

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 5:
            raise RuntimeError("out of luck")
        return (self.layer(x) - y).square().mean()


@ranks(1, 2)
def test_a_run_that_fails_keeps_the_record_that_was_under_way(tmp_path: Path):
    runner = make_runner(tmp_path, [LoggerHook(interval=2)], kind=Failing, default_hooks={"logger": None})
    with pytest.raises(RuntimeError, match="out of luck"):
        runner.train()
    if get_rank() == 0:
        assert written(runner.run_dir) == [2, 4]


class Counting(nn.Module):
    """Returns a value of the name of a record's own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {"loss": (self.layer(x) - y).square().mean(), "iter": torch.tensor(0.5)}


def test_a_value_of_the_name_of_a_place_does_not_replace_it(tmp_path: Path):
    cfg = {"max_iters": 4}
    hooks = [LoggerHook(interval=2)]
    runner = make_runner(tmp_path, hooks, kind=Counting, default_hooks={"logger": None}, train_cfg=cfg)
    with pytest.warns(UserWarning, match="a value called 'iter' is recorded as 'iter_', because"):
        runner.train()
    assert written(runner.run_dir) == [2, 4]


class Timed(Counting):
    """Returns values of names under which hooks record their own."""

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        own = {"time": 1e6, "samples": 3.0, "grad_norm": 1e6, "lr": 7.0}
        return {"loss": super().forward(x, y)["loss"]} | {name: torch.tensor(value) for name, value in own.items()}


def test_values_of_the_names_of_a_hooks_own_are_not_mixed_with_them(tmp_path: Path):
    cfg = {
        "train_cfg": {"max_iters": 2},
        "optim_wrapper": {"optimizer": {"type": "SGD", "lr": 0.1}, "clip_grad": {"max_norm": 9.0}},
    }
    runner = make_runner(tmp_path, [LoggerHook(interval=2)], kind=Timed, default_hooks={"logger": None}, **cfg)
    with pytest.warns(UserWarning, match="a value called '[a-z_]+' is recorded as '[a-z_]+_', because"):
        runner.train()
    record = json.loads((runner.run_dir / "metrics.jsonl").read_text().splitlines()[0])
    assert [record[f"{name}_"] for name in ("time", "samples", "grad_norm", "lr")] == [1e6, 3.0, 1e6, 7.0]
    assert record["lr"] == 0.1
    assert max(record["time"], record["grad_norm"]) < 1e5
    assert record["samples_per_second"] > 12 / 1e5


class Reader(Hook):
    """Notes after each iteration which records are there."""

    priority = "LOWEST"

    def __init__(self) -> None:
        self.read: list[list[int]] = []

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None) -> None:
        self.read.append(written(runner.run_dir))


@ranks(2)
def test_a_record_is_written_two_iterations_later(tmp_path: Path):
    reader, without = Reader(), {"logger": None, "checkpoint": None}
    cfg = {"max_iters": 6}
    runner = make_runner(tmp_path, [LoggerHook(interval=2), reader], default_hooks=without, train_cfg=cfg)
    runner.train()
    if get_rank() == 0:
        assert reader.read == [[], [], [], [2], [2], [2, 4]]
        assert written(runner.run_dir) == [2, 4, 6]


class Rising(nn.Module):
    """Returns the number of its step as the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.steps = nn.Parameter(torch.zeros(())), 0

    def forward(self, *batch: object) -> Tensor:
        self.steps += 1
        return 0 * self.weight + self.steps


def test_a_record_is_a_mean_over_all_its_iterations(tmp_path: Path):
    without, cfg = {"logger": None, "checkpoint": None}, {"max_iters": 1200}
    runner = make_runner(tmp_path, [LoggerHook(interval=1200)], kind=Rising, default_hooks=without, train_cfg=cfg)
    runner.train()
    record = json.loads((runner.run_dir / "metrics.jsonl").read_text().splitlines()[0])
    assert record["loss"] == 600.5


class FullDisk:
    """A visualizer that cannot take the second record."""

    def add_scalars(self, scalar_dict: dict[str, float], step: int = 0) -> None:
        if step == 4:
            raise OSError("no space left")


@ranks(2)
def test_a_record_that_cannot_be_shown_costs_no_other(tmp_path: Path):
    without = {"logger": None, "checkpoint": None}
    changes = {"train_cfg": {"max_iters": 8}, "visualizer": FullDisk()}
    runner = make_runner(tmp_path, [LoggerHook(interval=2)], default_hooks=without, **changes)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the visualizer FullDisk has failed")
        runner.train()
    if get_rank() == 0:
        assert written(runner.run_dir) == [2, 4, 6, 8]


class OutOfLuck(Hook):
    """Fails on one rank in the iteration of the second record, before or after that rank has sent its numbers."""

    def __init__(self, rank: int, priority: str) -> None:
        self.rank, self.priority = rank, priority

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None) -> None:
        if runner.rank == self.rank and runner.iter == 3:
            raise ValueError("out of luck")


def train_out_of_luck(folder: Path, failing: int, priority: str) -> None:
    hooks, without = [LoggerHook(interval=2), OutOfLuck(failing, priority)], {"logger": None, "checkpoint": None}
    make_runner(folder, hooks, default_hooks=without, train_cfg={"max_iters": 8}).train()


@pytest.mark.parametrize("priority", ["NORMAL", "LOWEST"])
@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_fails_beside_a_record_is_named(tmp_path: Path, failing: int, priority: str):
    with pytest.raises(RankFailure, match=f"rank {failing}(.|\n)*ValueError: out of luck"):
        run_ranks(2, train_out_of_luck, tmp_path, failing, priority)


def written(run_dir: Path) -> list[int]:
    path = run_dir / "metrics.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [record["iter"] for record in records if record["mode"] == "train"]


class Intermittent(nn.Module):
    """Returns the number of its step in every second one, and a value in the first two alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.calls = 0

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        self.calls += 1
        values = {"loss": (self.layer(x) - y).square().mean()}
        if self.calls % 2 == 0:
            values["second"] = torch.tensor(float(self.calls))
        if self.calls <= 2:
            values["first"] = torch.tensor(float(self.calls))
        return values


class Updates(Hook):
    """Puts into the hub what `Intermittent` returns."""

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None) -> None:
        done = runner.iter + 1
        if done % 2 == 0:
            runner.message_hub.update_scalar("train/second", done)
        if done <= 2:
            runner.message_hub.update_scalar("train/first", done)


@ranks(1, 2)
@pytest.mark.parametrize("is_returned", [True, False])
def test_a_value_counts_in_the_iterations_that_have_it(is_returned: bool, tmp_path: Path):
    cfg = {"max_iters": 12, "by_epoch": False}
    hooks, kind = ([], {"kind": Intermittent}) if is_returned else ([Updates()], {})
    make_runner(
        tmp_path, [LoggerHook(interval=4), *hooks], default_hooks={"logger": None}, train_cfg=cfg, **kind
    ).train()
    if get_rank() == 0:
        lines = map(json.loads, next(tmp_path.glob("*/metrics.jsonl")).read_text().splitlines())
        records = [line for line in lines if line["mode"] in ("train", "epoch")]
        assert [(one.get("second"), one.get("first")) for one in records] == [
            (3.0, 1.5), (7.0, None), (11.0, None), (7.0, 1.5),
        ]  # fmt: skip


class Seldom(Hook):
    """Records the number of each third iteration, and another one before the training."""

    def before_train(self, runner) -> None:
        runner.message_hub.update_scalar("train/third", 100.0)

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None) -> None:
        if (runner.iter + 1) % 3 == 0:
            runner.message_hub.update_scalar("train/third", runner.iter + 1)


def test_a_value_that_a_hook_records_now_and_then_counts_in_one_record(tmp_path: Path):
    hooks, cfg = [LoggerHook(interval=2), Seldom()], {"max_iters": 8, "by_epoch": False}
    make_runner(tmp_path, hooks, default_hooks={"logger": None}, train_cfg=cfg).train()
    lines = map(json.loads, next(tmp_path.glob("*/metrics.jsonl")).read_text().splitlines())
    records = [line for line in lines if line["mode"] in ("train", "epoch")]
    assert [one.get("third") for one in records] == [None, 3.0, 6.0, None, 4.5]


def test_only_iterations_that_make_an_update_have_a_norm_of_gradients(tmp_path: Path):
    wrapper = {"optimizer": {"type": "SGD", "lr": 0.1}, "accumulative_counts": 2, "clip_grad": {"max_norm": 1.0}}
    make_runner(tmp_path, [LoggerHook(interval=1)], default_hooks={"logger": None}, optim_wrapper=wrapper).train()
    lines = [json.loads(line) for path in tmp_path.glob("*/metrics.jsonl") for line in path.read_text().splitlines()]
    rows = {one["iter"]: "grad_norm" in one for one in lines if one["mode"] == "train"}
    assert len(rows) > 3
    assert all(has == (number % 2 == 0 or number == max(rows)) for number, has in rows.items())


class Pair(nn.Module):
    """Two parts, each with an optimizer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 1), nn.Linear(2, 1)

    def train_step(self, data, optim_wrapper):
        (inputs,) = data
        for name in ("first", "second"):
            optim_wrapper[name].update_params(getattr(self, name)(inputs).square().mean())
        return {}


def test_each_of_several_optimizers_has_a_norm_of_gradients(tmp_path: Path):
    sgd = {"type": "SGD", "lr": 0.1}
    wrapper = {"first": {"optimizer": sgd, "clip_grad": {"max_norm": 1.0}}, "second": {"optimizer": sgd}}
    data = {"dataset": TensorDataset(torch.ones(6, 2)), "batch_size": 2}
    Runner(Pair(), tmp_path, train_dataloader=data, train_cfg={"max_epochs": 1}, optim_wrapper=wrapper).train()
    lines = [json.loads(line) for path in tmp_path.glob("*/metrics.jsonl") for line in path.read_text().splitlines()]
    norms = [{name for name in one if "grad_norm" in name} for one in lines if one["mode"] == "train"]
    assert norms == [{"first.grad_norm"}]


def test_weights_that_are_exported_amid_an_epoch_make_no_record(tmp_path: Path):
    class Exports(Hook):
        def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None) -> None:
            if runner.iter == 1:
                runner.save_pretrained(tmp_path / "exported")

    runner = make_runner(tmp_path / "run", [Exports()], default_hooks={"logger": {"interval": 3}})
    runner.train()
    assert written(runner.run_dir)[0] == 3
    assert list((tmp_path / "exported").iterdir())


def test_without_a_timer_no_rate_is_recorded(tmp_path: Path):
    runner = make_runner(tmp_path, [], default_hooks={"timer": None})
    runner.train()
    lines = [json.loads(line) for line in (runner.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert "loss" in lines[0]
    assert not [one for one in lines if "samples_per_second" in one]


def test_a_checkpoint_amid_an_epoch_has_the_sums_of_all_its_iterations(tmp_path: Path):
    def records(work_dir: Path, **changes) -> list[dict]:
        saves = {"checkpoint": {"interval": 1, "by_epoch": False, "max_keep_ckpts": -1}, "logger": {"interval": 4}}
        make_runner(work_dir, [], default_hooks=saves, randomness={"seed": 1}, **changes).train()
        path = max(work_dir.glob("*/metrics.jsonl"))
        lines = map(json.loads, path.read_text().splitlines())
        return [{key: one.get(key) for key in ("iter", "loss")} for one in lines if one["mode"] in ("train", "epoch")]

    whole = records(tmp_path / "whole")
    saved = next((tmp_path / "whole").glob("*/iter_2"))
    resumed = records(tmp_path / "resumed", load_from=str(saved), resume=True)
    assert [one["iter"] for one in whole[:5]] == [1, 2, 3, 4, 4]  # the last one is of the epoch
    assert resumed == whole[2:]


class Own(Hook):
    """Records the number of the iteration, and fails at one."""

    def __init__(self, fails_at: int) -> None:
        self.fails_at = fails_at

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None) -> None:
        if runner.iter == self.fails_at:
            raise RuntimeError("killed")
        runner.message_hub.update_scalar("train/own", float(runner.iter + 1))


def train_part(tmp_path: Path, fails_at: int) -> None:
    hooks = [Own(fails_at), {"type": "CheckpointHook", "by_epoch": False, "interval": 2}]
    options = {"default_hooks": {"checkpoint": None}, "train_cfg": {"max_epochs": 1}, "resume": True}
    runner = make_runner(tmp_path, hooks, kind=Failing, **options)
    if fails_at == -1:
        runner.train()
        return
    with pytest.raises(RuntimeError, match="killed"):
        runner.train()


@pytest.mark.parametrize("sizes", [(2, 1), (1, 2)])
def test_the_means_of_an_epoch_count_iterations_alike_on_any_number_of_ranks(tmp_path: Path, sizes: tuple[int, int]):
    run_ranks(sizes[0], train_part, tmp_path, 2)
    run_ranks(sizes[1], train_part, tmp_path, -1)
    lines = [json.loads(line) for path in tmp_path.glob("*/metrics.jsonl") for line in path.read_text().splitlines()]
    (epoch,) = [one for one in lines if one["mode"] == "epoch"]
    assert epoch["own"] == 2.5


class Counted(Hook):
    """Records sums with their counts, as MMEngine's code does."""

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None) -> None:
        for right, of in ((6.0, 8), (1.0, 2)):
            runner.message_hub.update_scalar("train/right", right, of)
        runner.message_hub.update_scalars({"train/more": {"value": 3.0, "count": 4}})


@ranks(1, 2)
def test_a_sum_counts_as_so_many_values(tmp_path: Path):
    runner = make_runner(tmp_path, [Counted()])
    runner.train()
    assert runner.message_hub.get_scalar("train/right").mean() == 0.7
    assert runner.message_hub.get_scalar("train/right").data[1][-2:] == [8, 2]
    if get_rank() == 0:
        lines = map(json.loads, (runner.run_dir / "metrics.jsonl").read_text().splitlines())
        means = [(one["right"], one["more"]) for one in lines if one["mode"] in ("train", "epoch")]
        assert set(means) == {(0.7, 0.75)}


class Hits(Hook):
    """Records sums, of which one rank has a single value."""

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None) -> None:
        hits, of = (6.0, 8) if runner.rank == 0 else (0.0, 1)
        runner.message_hub.update_scalar("train/hits", hits, of)


@ranks(2)
def test_a_rank_whose_sums_are_of_one_value_counts_like_the_others(tmp_path: Path):
    hooks = [LoggerHook(interval=1), Hits()]
    runner = make_runner(tmp_path, hooks, default_hooks={"logger": None})
    runner.train()
    if get_rank() == 0:
        lines = map(json.loads, (runner.run_dir / "metrics.jsonl").read_text().splitlines())
        assert {one["hits"] for one in lines if one["mode"] in ("train", "epoch")} == {6 / 9}
