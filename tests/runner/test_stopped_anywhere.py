"""A training that is stopped anywhere and goes on is the training that was not stopped, corner by corner.

`make soak-resume` draws such corners at random.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from lockstep import Runner, Session
from lockstep.errors import Preempted
from lockstep.evaluator import BaseMetric
from lockstep.hooks import Hook
from lockstep.testing import ranks

from .soak_resume import differences

X = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))


class Noisy(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, index: int) -> torch.Tensor:
        return X[index] + torch.rand(4)


class Counts(Hook):
    """Has a state of its own: what it was told of."""

    def __init__(self) -> None:
        self.told: dict[str, Any] = {"epochs": 0, "scores": []}

    def after_train_epoch(self, runner) -> None:
        self.told["epochs"] += 1

    def after_val_epoch(self, runner, metrics=None) -> None:
        self.told["scores"].append(metrics["score"])

    def before_save_checkpoint(self, runner, checkpoint) -> None:
        checkpoint["meta"]["counts"] = json.loads(json.dumps(self.told))

    def after_load_checkpoint(self, runner, checkpoint) -> None:
        self.told.update(checkpoint["meta"]["counts"])


class Killed(BaseException):
    """In place of a SIGKILL, which would end the tests."""


def recorded(work_dir: Path) -> list[tuple[Any, ...]]:
    """Return the means of each epoch, and the metrics of each validation, in all runs."""
    lines = [line for path in sorted(work_dir.glob("*/metrics.jsonl")) for line in path.read_text().splitlines()]
    found = [one for one in map(json.loads, lines) if one["mode"] in ("epoch", "val")]
    names = ("mode", "epoch", "iter", "loss", "lr", "grad_norm", "score")
    return [tuple(one.get(name) for name in names) for one in found]


def trained(
    work_dir: Path,
    body: Callable[..., None],
    place: Any = None,
    *,
    schedules: bool = False,
    is_killed: bool = False,
    **options: Any,
):
    """Train three epochs of six iterations; return what was seen, told and left. A stop, or a kill, is at `place`."""
    counts = Counts()
    options |= {"randomness": {"seed": 0}, "custom_hooks": [counts], "clip_grad": {"max_norm": 1.0}}
    session = Session(work_dir, log_level="ERROR", **options)
    model = nn.Sequential(nn.Linear(4, 1), nn.Dropout(0.3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    loader = DataLoader(TensorDataset(X), batch_size=2 // session.world_size, shuffle=True)
    model, _, batches = session.prepare(model, optimizer, loader, schedulers=[schedule] if schedules else [])
    held_out = session.prepare_evaluation(DataLoader(Noisy(), batch_size=4 // session.world_size))
    seen: dict[int, Any] = {}

    def at(*where: Any) -> None:
        if where == place and is_killed:
            raise Killed
        if where == place:
            session.run.agreement.ask("a stop")

    def train(ends: int = 0) -> None:
        for (x,) in batches:
            at("step", session.iter)
            session.step((model(x) - 1).square().mean())
            seen[session.iter] = x.tolist(), optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["weight_decay"]
            if session.batch_idx + 1 == ends:
                break

    def validate(name: str, epoch: int) -> None:
        with torch.no_grad():
            scores = []
            for number, x in enumerate(held_out):
                at(name, epoch, number)
                scores.append(session.gather(model(x)))
        session.log_metrics(score=torch.cat(scores).sum().item())

    for epoch in session.epochs(3):
        body(epoch=epoch, session=session, at=at, train=train, validate=validate, group=optimizer.param_groups[0],
             schedule=schedule)  # fmt: skip
    weights = [one.detach().clone() for one in model.parameters()]
    return seen, counts.told, [one.tolist() for one in weights], (session.iter, session.epoch)


def leaves(epoch, train, validate, schedule, **_) -> None:
    train(3)
    validate("rest", epoch)
    schedule.step()


def changes_last(epoch, at, train, group, **_) -> None:
    train()
    group["weight_decay"] += 0.1
    at("end", epoch)


def changes_first(epoch, at, train, group, schedule, **_) -> None:
    if epoch:
        schedule.step()
        group["weight_decay"] += 0.1
    at("begin", epoch)
    train()


def validates_first(epoch, train, validate, **_) -> None:
    validate("first", epoch)
    train()


def validates_twice(epoch, train, validate, **_) -> None:
    train()
    validate("rest", epoch)
    validate("again", epoch)


def saves_before_the_schedule(epoch, session, train, schedule, group, **_) -> None:
    train()
    group["weight_decay"] += 0.1
    session.save(f"asked_{epoch}")
    schedule.step()


def saves_between(epoch, at, session, train, validate, schedule, **_) -> None:
    train()
    schedule.step()
    session.save(f"asked_{epoch}")
    validate("rest", epoch)
    at("end", epoch)


def stops_itself(epoch, session, train, **_) -> None:
    if epoch == 1:
        session.stop()
    train()


EVERY_SECOND = {"default_hooks": {"checkpoint": {"interval": 2}}}


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")  # the first thing that a resumed loop does
@pytest.mark.parametrize(
    ("body", "place", "options"),
    [
        (leaves, ("rest", 1, 1), {"schedules": True}),
        (changes_last, ("end", 0), {}),
        (changes_first, ("begin", 1), {"schedules": True, **EVERY_SECOND}),
        (changes_first, ("begin", 1), {"schedules": True}),
        (validates_first, ("first", 1, 2), {}),
        (validates_first, ("step", 8), {}),
        (validates_first, ("step", 8), {"schedules": True}),
        (validates_twice, ("again", 1, 1), {}),
        (validates_twice, ("again", 2, 1), {}),
        (validates_twice, ("again", 1, 1), {"schedules": True}),
        (validates_twice, ("step", 11), {"accumulative_counts": 3}),
        (saves_between, ("end", 1), {"schedules": True, **EVERY_SECOND}),
        (stops_itself, ("step", 8), {}),
        (stops_itself, ("step", 11), {"schedules": True}),
    ],
)
def test_a_loop_goes_on_as_if_it_had_not_been_stopped(body, place, options, tmp_path):
    whole, *left = trained(tmp_path / "whole", body, **options)
    with pytest.raises(Preempted):
        trained(tmp_path / "work", body, place, **options)
    rest, *rest_left = trained(tmp_path / "work", body, resume=True, **options)
    assert rest == {number: one for number, one in whole.items() if number in rest}
    assert rest_left == left
    assert recorded(tmp_path / "work") == recorded(tmp_path / "whole")


@pytest.mark.parametrize(
    ("body", "place", "options"),
    [
        (changes_last, ("end", 0), {}),
        (changes_last, ("step", 8), {}),
        (validates_twice, ("rest", 0, 1), {}),
        (validates_twice, ("rest", 1, 1), {}),
        (validates_twice, ("again", 1, 1), {}),
        (validates_twice, ("again", 2, 1), {}),
        (validates_twice, ("step", 12), {}),
        (validates_twice, ("rest", 1, 1), EVERY_SECOND),
    ],
)
def test_a_loop_that_is_killed_in_the_rest_of_its_body_runs_the_rest_once_more(body, place, options, tmp_path):
    whole, *left = trained(tmp_path / "whole", body, **options)
    with pytest.raises(Killed):
        trained(tmp_path / "work", body, place, is_killed=True, **options)
    rest, *rest_left = trained(tmp_path / "work", body, resume=True, **options)
    assert rest == {number: one for number, one in whole.items() if number in rest}
    assert rest_left == left
    # The records of the resumed training have once more what hooks were told again; iterations after the checkpoint
    # are made once more.
    assert {*recorded(tmp_path / "work")} == {*recorded(tmp_path / "whole")}


def test_a_checkpoint_before_a_schedules_step_has_the_options_of_the_end_of_the_batches(tmp_path):
    whole, *left = trained(tmp_path / "whole", saves_before_the_schedule, schedules=True)
    saved = next(tmp_path.glob("whole/*/asked_1"))
    options = {"schedules": True, "resume": True, "load_from": saved}
    rest, *rest_left = trained(tmp_path / "work", saves_before_the_schedule, **options)
    assert rest == {number: one for number, one in whole.items() if number >= 12}
    assert rest_left == left


def test_a_training_that_goes_on_until_it_was_to_end_says_so(tmp_path):
    with pytest.raises(Preempted):
        trained(tmp_path / "work", stops_itself, ("step", 8))
    trained(tmp_path / "work", stops_itself, resume=True)
    logs = [path.read_text() for path in sorted((tmp_path / "work").glob("*/log.txt"))]
    assert ["the training ends with this epoch, as was asked for before" in log for log in logs] == [False, True]


@ranks(1, 2)
@pytest.mark.parametrize("schedules", [False, True])
def test_a_loop_that_has_ended_by_break_goes_on_to_the_end_when_it_is_resumed(schedules, tmp_path):
    def train(*, resume: bool, budget: int) -> tuple[int, int]:
        session = Session(tmp_path / "work", resume=resume, log_level="ERROR")
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        loader = DataLoader(TensorDataset(X), batch_size=2 // session.world_size)
        model, optimizer, loader = session.prepare(model, optimizer, loader, schedulers=[schedule] * schedules)
        steps = 0
        with session:
            for _ in session.epochs(3):
                for (x,) in loader:
                    session.step(model(x).square().mean())
                    schedule.step()
                    steps += 1
                    if steps == budget:  # of a job: of time, say
                        session.save("asked")
                        session.stop()
                        break
                if steps == budget:
                    break
        return steps, session.epoch

    assert train(resume=False, budget=8) == (8, 1)
    assert train(resume=True, budget=100) == (10, 3)


@ranks(2)
def test_one_rank_stops_a_training_that_a_signal_stops_before(tmp_path):
    def stops_on_rank_1(epoch, session, train, validate, **_) -> None:
        if epoch == 1 and session.rank == 1:
            session.stop()
        train()
        validate("rest", epoch)

    whole = trained(tmp_path / "whole", stops_on_rank_1)
    with pytest.raises(Preempted):
        trained(tmp_path / "work", stops_on_rank_1, ("step", 8))
    rest = trained(tmp_path / "work", stops_on_rank_1, resume=True)
    assert rest[1:] == whole[1:]


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's, of schedules
@pytest.mark.parametrize("seed", [4, 9, 12, 17, 18, 19, 97, 40279])
def test_a_loop_that_is_drawn_at_random_goes_on(seed, tmp_path):
    assert not [*differences(seed, tmp_path)]


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's, of schedules
@pytest.mark.parametrize("seed", [0, 12, 69, 71, 97, 243])
def test_a_loop_that_is_drawn_at_random_goes_on_after_kills(seed, tmp_path):
    assert not [*differences(seed, tmp_path, kills=True)]


def test_a_loop_may_validate_before_its_first_epoch(tmp_path):
    def body(train, **_) -> None:
        train()

    options = {"default_hooks": {"checkpoint": {"save_best": "score", "rule": "less"}}, "randomness": {"seed": 0}}
    session = Session(tmp_path, log_level="ERROR", **options)
    model = nn.Linear(4, 1)
    loader = DataLoader(TensorDataset(X), batch_size=4)
    model, _, batches = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
    session.log_metrics(score=1.0)
    for _ in session.epochs(1):
        for (x,) in batches:
            session.step(model(x).square().mean())
    assert session.best_checkpoint is not None


class StopsIn(Hook):
    """Ends the training after an iteration, and asks for a stop, as a signal does, at another moment."""

    def __init__(self, place: str) -> None:
        self.place = place

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None) -> None:
        if runner.iter == 7:
            runner.train_loop.stop_training = True
        self.ask(runner, f"iteration {runner.iter}")

    def before_val_epoch(self, runner) -> None:
        self.ask(runner, f"validation {runner.iter}")

    def ask(self, runner, place: str) -> None:
        if place == self.place:
            runner.agreement.ask("a stop")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, x, mode: str = "tensor"):
        out = self.layer(x)
        return {"loss": out.square().mean()} if mode == "loss" else out


class Total(BaseMetric):
    def process(self, data_batch, data_samples) -> None:
        self.results += data_samples[:, 0].tolist()

    def compute_metrics(self, results) -> dict[str, float]:
        return {"score": sum(results)}


@pytest.mark.parametrize(
    ("by_epoch", "place"), [(True, "iteration 8"), (True, "validation 12"), (False, "validation 8")]
)
def test_a_runner_that_was_to_end_ends_where_it_would_have(by_epoch, place, tmp_path):
    def run(folder: str, place: str = "", **options: Any):
        hook, counts = StopsIn(place), Counts()
        torch.manual_seed(0)  # the same model each time, whichever tests came before
        runner = Runner(
            Model(), tmp_path / folder, train_dataloader=DataLoader(TensorDataset(X), batch_size=2, shuffle=True),
            val_dataloader=DataLoader(TensorDataset(X), batch_size=4), custom_hooks=[hook, counts], log_level="ERROR",
            optim_wrapper={"optimizer": {"type": "SGD", "lr": 0.1}}, randomness={"seed": 0}, val_evaluator=Total(),
            train_cfg={"max_epochs": 4} if by_epoch else {"by_epoch": False, "max_iters": 30, "val_interval": 20},
            **options,
        )  # fmt: skip
        runner.train()
        return counts.told, runner.iter

    whole = run("whole")
    with pytest.raises(Preempted):
        run("work", place)
    assert run("work", resume=True) == whole
