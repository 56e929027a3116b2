"""What a session saves: whatever `save()` was asked for, in whichever way the loop ends."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from contextlib import nullcontext, suppress
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - as everybody calls it
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lockstep import Session
from lockstep.checkpoint import find_last_checkpoint, read_meta
from lockstep.dist import all_gather_object, barrier, get_rank, get_world_size
from lockstep.errors import ConfigError, Preempted
from lockstep.hooks import Hook
from lockstep.runner import load_checkpoint, preemption
from lockstep.testing import ranks

X = torch.ones(12, 4)


def prepared(work_dir: Path, **options):
    session = Session(work_dir, randomness={"seed": 0}, log_level="ERROR", **options)
    model = nn.Linear(4, 2)
    loader = DataLoader(TensorDataset(X, torch.zeros(12).long()), batch_size=2 // get_world_size())
    return session, *session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)


class Counts(Hook):
    """Counts the iterations that the last checkpoint shows it."""

    seen = counted = 0

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None) -> None:
        self.seen += 1

    def before_save_checkpoint(self, runner, checkpoint) -> None:
        self.counted = self.seen


def leave(session, model, batches, how: str, *, steps_first: bool = True) -> None:
    """Train for three iterations, and leave the loop in the third one."""
    for _ in session.epochs(3):
        for x, y in batches:
            is_third = session.iter == 2
            if is_third and not steps_first:
                session.save("asked")
                return
            session.step(F.cross_entropy(model(x), y))
            if is_third:
                session.save("asked")
                if how == "raise":
                    raise ValueError("of the user's own")
                if how == "exit":
                    sys.exit(3)
                if how == "return":
                    return
                break
        if how == "break":
            break


@ranks(1, 2)
@pytest.mark.parametrize("ends", ["at the end", "in the next epoch"])
def test_hooks_know_after_a_resume_what_they_were_told_after_the_checkpoint_of_the_epoch(tmp_path, ends):
    """It was saved before the validation, in the rest of the epoch's body."""
    scores = [0.5, 0.9, 0.7, 0.6, 0.55]

    def train(epochs: int, *, resume: bool) -> Session:
        session, model, _, batches = prepared(
            tmp_path,
            resume=resume,
            default_hooks={"checkpoint": {"save_best": "accuracy"}},
            custom_hooks=[{"type": "EarlyStoppingHook", "monitor": "accuracy", "patience": 2, "min_delta": 0.0}],
        )
        with suppress(KeyboardInterrupt):
            for epoch in session.epochs(epochs):
                for x, y in batches:
                    session.step(F.cross_entropy(model(x), y))
                    if ends == "in the next epoch" and not resume and epoch == 2:
                        raise KeyboardInterrupt
                session.log_metrics(accuracy=scores[epoch])
        return session

    train(2 if ends == "at the end" else 5, resume=False)
    session = train(5, resume=True)
    assert (session.epoch, session.best_checkpoint.name) == (4, "best_accuracy_epoch_2")
    stopped = train(5, resume=True)  # it is told of the last validation, too, and trains no further epoch
    assert (stopped.epoch, stopped.best_checkpoint.name) == (4, "best_accuracy_epoch_2")


@pytest.mark.parametrize("how", ["return", "break", "raise", "exit", "raise in a block"])
@ranks(1, 2)
def test_a_save_is_made_however_the_loop_is_left(tmp_path, how):
    hook = Counts()
    session, model, _, batches = prepared(tmp_path, custom_hooks=[hook])
    ends = {"raise": ValueError, "exit": SystemExit}.get(how.partition(" ")[0])
    if how.endswith("block"):
        with pytest.raises(ValueError, match="own"), session:
            leave(session, model, batches, "raise")
    elif ends:
        with pytest.raises(ends):
            leave(session, model, batches, how)
    else:
        leave(session, model, batches, how)
    meta = read_meta(session.run_dir / "asked")
    assert (meta["iter"], meta["epoch"], meta["position"]["batches"]) == (3, 0, 3)
    assert hook.counted == 3  # hooks see the iteration before it is saved, as a run that never stops shows it to them


def test_an_iteration_that_is_left_without_a_step_does_not_count(tmp_path):
    session, model, _, batches = prepared(tmp_path)
    leave(session, model, batches, "return", steps_first=False)
    assert read_meta(session.run_dir / "asked")["iter"] == 2


def test_a_save_between_iterations_is_made_at_once(tmp_path):
    session, model, _, batches = prepared(tmp_path)
    session.save("first")
    assert read_meta(session.run_dir / "first")["iter"] == 0
    leave(session, model, batches, "break")
    session.save("last")
    assert read_meta(session.run_dir / "last")["iter"] == 3


@pytest.mark.parametrize(("how", "told"), [("break", True), ("stop", False), ("save", False), ("no hook", False)])
@ranks(1, 2)
def test_a_loop_that_is_left_tells_what_is_in_no_checkpoint(tmp_path, how, told):
    options = {"default_hooks": {"checkpoint": None}} if how == "no hook" else {}
    session, model, _, batches = prepared(tmp_path, **options)
    for epoch in session.epochs(9):
        for x, y in batches:
            session.step(F.cross_entropy(model(x), y))
            if epoch == 1:
                break
        if epoch == 1 and how != "stop":
            break
        if epoch == 1:
            session.stop()
    if how == "save":
        session.save("last")
    unsaved = session.run.train_loop.unsaved
    assert len(unsaved) == (told and get_rank() == 0)
    assert all(
        "after iteration 7, and what it has trained since iteration 6 is in no checkpoint" in one for one in unsaved
    )


@ranks(1, 2)
def test_a_block_whose_loop_is_left_tells_what_is_in_no_checkpoint(tmp_path):
    session, model, *_ = prepared(tmp_path)
    with session:
        for x, y in session.iterations(9):
            session.step(F.cross_entropy(model(x), y))
            if session.iter == 3:
                break
    told = "after iteration 4, and what it has trained since iteration 0 is in no checkpoint"
    assert get_rank() != 0 or told in (session.run_dir / "log.txt").read_text()


@pytest.mark.parametrize("how", ["background", "complete, saved without the optimizer"])
@ranks(1, 2)
def test_what_is_being_saved_is_not_told_nor_a_complete_loop(tmp_path, how):
    options = {} if how == "background" else {"default_hooks": {"checkpoint": {"save_optimizer": False}}}
    session, model, _, batches = prepared(tmp_path, **options)
    with session:
        for _ in session.epochs(2):
            for x, y in batches:
                session.step(F.cross_entropy(model(x), y))
            if how == "background":
                session.save("mine", async_save=True)
                break
    assert "is in no checkpoint" not in (session.run_dir / "log.txt").read_text()


@ranks(2)
def test_a_rank_that_fails_alone_waits_for_the_others_only_for_a_while():
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(preemption, "_SECONDS_TO_MEET", 0.2)
        assert get_rank() == 0 or not preemption.ranks_meet()
    barrier()
    if get_rank() == 0:
        assert not preemption.ranks_meet()  # too late: the other has given up, and is gone
    barrier()
    assert preemption.ranks_meet()


SCRIPT = """
import torch
from torch import nn
from lockstep import Session

session = Session("work_dir")
model = nn.Linear(4, 2)
model, _, loader = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), [torch.ones(2, 4)] * 3)
epochs = session.epochs(2)
next(epochs)
batches = iter(loader)
session.step(model(next(batches)).square().mean())
session.save("asked"{how})
"""


@pytest.mark.jobs
@pytest.mark.parametrize(("how", "code"), [(", async_save=True", 0), (")\nraise ValueError(", 1)])
def test_a_script_that_ends_within_an_iteration_has_saved(tmp_path, how, code):
    (tmp_path / "train.py").write_text(SCRIPT.format(how=how))
    ended = subprocess.run([sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert ended.returncode == code, ended.stderr
    (saved,) = tmp_path.glob("work_dir/*/asked")
    assert read_meta(saved)["iter"] == 1
    assert "asked is saved at the end of the present iteration" in ended.stdout
    assert ended.stdout.count("after 1 iterations") == 1


@pytest.mark.jobs
@pytest.mark.parametrize(("left_by", "told"), [("break", True), ("raise ValueError", False)])
def test_a_script_tells_at_its_end_what_is_in_no_checkpoint(tmp_path, left_by, told):
    begin, *_ = SCRIPT.partition("epochs =")
    loop = f"for x in session.iterations(9):\n    session.step(model(x).square().mean())\n    {left_by}\n"
    (tmp_path / "train.py").write_text(begin + loop)
    ended = subprocess.run([sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert ended.returncode == (0 if told else 1), ended.stderr
    assert ("after iteration 1, and what it has trained since iteration 0 is in no checkpoint" in ended.stderr) is told


@ranks(1, 2)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_the_best_weights_take_the_place_of_an_average(tmp_path, strategy):
    hooks = {"custom_hooks": [{"type": "EMAHook", "momentum": 0.5}]}
    options = {"strategy": strategy, "default_hooks": {"checkpoint": {"save_best": "accuracy"}}, **hooks}
    session, model, _, batches = prepared(tmp_path / "run", **options)
    loader = session.prepare_evaluation(DataLoader(X[:4], batch_size=2))

    def predicted() -> torch.Tensor:
        with torch.no_grad():
            return torch.cat([session.gather(model(x)) for x in loader])

    averages = []
    with session:
        for epoch in session.epochs(3):
            for x, y in batches:
                session.step(F.cross_entropy(model(x), y))
            averages.append(predicted())
            session.log_metrics(accuracy=[0.5, 0.9, 0.3][epoch])
        assert session.best_checkpoint.name == "best_accuracy_epoch_2"
        if strategy == "ddp":  # what is loaded into a copy is not loaded into the model
            for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
                load_checkpoint(copied, session.best_checkpoint)
                assert torch.equal(predicted(), averages[2])
        load_checkpoint(model, session.best_checkpoint)
        assert torch.equal(predicted(), averages[1])
        session.save_pretrained(tmp_path / "exported")
    session, model, _, batches = prepared(tmp_path / "run", resume=True, **options)  # a new folder
    with session:
        assert session.best_checkpoint.name == "best_accuracy_epoch_2"
    exported = nn.Linear(4, 2)
    load_checkpoint(exported, tmp_path / "exported")
    assert torch.allclose(exported(X[:4]), averages[1])


def test_metrics_of_several_sets_go_into_one_call(tmp_path):
    def train(**metrics):
        session, model, _, batches = prepared(tmp_path, default_hooks={"checkpoint": {"save_best": "b/loss"}})
        with session:
            for _ in session.epochs(1):
                for x, y in batches:
                    session.step(F.cross_entropy(model(x), y))
                session.log_metrics(**metrics)
        return session

    with pytest.raises(ConfigError, match=r"those of several sets, to one call of `session\.log_metrics`"):
        train(**{"a/loss": 1.0})
    assert train(**{"a/loss": 1.0, "b/loss": 2.0}).best_checkpoint.name == "best_b_loss_epoch_1"


def test_a_best_checkpoint_that_fails_is_not_the_best_where_the_loop_goes_on(tmp_path):
    session, model, _, batches = prepared(tmp_path, default_hooks={"checkpoint": {"save_best": "accuracy"}})
    in_its_place = session.run_dir / "best_accuracy_epoch_2"
    in_its_place.touch()
    for epoch in session.epochs(3):
        for x, y in batches:
            session.step(F.cross_entropy(model(x), y))
        with pytest.raises(OSError, match="best_accuracy_epoch_2") if epoch == 1 else nullcontext():
            session.log_metrics(accuracy=[0.5, 0.9, 0.7][epoch])
    assert session.best_checkpoint == session.run_dir / "best_accuracy_epoch_3"


def rates_of(work_dir: Path, how: str = "", *, steps: str = "last", **options):
    """Train three epochs, of which the body of the second ends early; return its rates, validations and weights."""
    session = Session(work_dir, randomness={"seed": 0}, log_level="ERROR", **options)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    loader = DataLoader(TensorDataset(torch.randn(12, 4), torch.zeros(12).long()), batch_size=2, shuffle=True)
    model, _, batches = session.prepare(model, optimizer, loader, schedulers=[schedule] if steps else [])
    validating, rates, validated = session.prepare_evaluation(DataLoader(X, batch_size=2)), {}, []
    for epoch in session.epochs(3):
        if steps == "begin" and epoch:
            schedule.step()
            optimizer.param_groups[0]["weight_decay"] += 0.1
        for x, y in batches:
            assert session.batch_idx == session.iter - 6 * epoch
            rates[session.iter] = [*schedule.get_last_lr(), optimizer.param_groups[0]["weight_decay"]]
            if how == "cut" and session.iter == 8:
                session.run.agreement.ask("a stop")
            session.step(F.cross_entropy(model(x), y))
            if steps == "iteration":
                schedule.step()
        if steps == "first":
            schedule.step()
        for number, _ in enumerate(validating):
            if how == "stop" and (epoch, number) == (1, 1):
                session.run.agreement.ask("a stop")
        session.log_metrics(accuracy=epoch)
        validated.append(epoch)
        if how == "save" and epoch == 1:
            session.save("asked")
            return rates, validated, session.run_dir / "asked"
        if how == "best" and epoch == 1:
            return rates, validated, session.best_checkpoint
        if steps == "last":
            schedule.step()
    return rates, validated, model.weight.detach().clone()


@pytest.mark.parametrize("steps", ["begin", "iteration", "first", "last", ""])
@pytest.mark.parametrize("how", ["cut", "stop", "save", "best"])
def test_what_is_saved_before_the_body_of_an_epoch_ends_goes_on_in_it_where_it_must(how, steps, tmp_path):
    options = {"default_hooks": {"checkpoint": {"save_best": "accuracy"}}, "steps": steps}
    rates, _, weights = rates_of(tmp_path / "whole", **options)
    assert len({*map(tuple, rates.values())}) == (18 if steps == "iteration" else 3 if steps else 1)
    if how in ("stop", "cut"):
        with pytest.raises(Preempted):
            rates_of(tmp_path / "work", how, **options)
        rest = rates_of(tmp_path / "work", resume=True, **options)
    else:
        *_, saved = rates_of(tmp_path / "work", how, **options)
        rest = rates_of(tmp_path / "rest", resume=True, load_from=saved, **options)
    assert rest[0] == {number: rate for number, rate in rates.items() if number >= (9 if how == "cut" else 12)}
    assert rest[1] == ([1, 2] if steps or how in ("stop", "cut") else [2])
    assert torch.equal(rest[2], weights)


class CutError(Exception):
    pass


@ranks(1, 2)
@pytest.mark.parametrize("leaves", [False, True])
def test_a_loop_goes_on_from_the_best_checkpoint_that_it_has_saved_on_its_way(leaves, tmp_path):
    def trained(folder: Path, is_cut: bool = False, resume: bool = False) -> tuple[list[int], torch.Tensor]:
        hooks = {"checkpoint": {"save_best": "score", "rule": "greater"}}
        session = Session(folder, resume=resume, log_level="ERROR", default_hooks=hooks, randomness={"seed": 1})
        torch.manual_seed(0)
        data = TensorDataset(torch.arange(40.0).reshape(-1, 1) / 40, torch.arange(40))
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        model, _, batches = session.prepare(model, optimizer, DataLoader(data, batch_size=2, shuffle=True))
        seen = []
        for epoch in session.epochs(2):
            for number, (x, i) in enumerate(batches):
                session.step((model(x) - 1).square().mean())
                seen += i.tolist()
                if leaves and number == 3:
                    break
                if not leaves and epoch == 0 and number == 3:
                    session.log_metrics(score=1.0)
                if is_cut and number == 4:
                    raise CutError
            if leaves:
                session.log_metrics(score=1.0 - epoch)
                if is_cut:
                    raise CutError
        return seen, model.weight.detach().clone()

    whole, weight = trained(tmp_path / "whole")
    with pytest.raises(CutError):
        trained(tmp_path / "cut", is_cut=True)
    seen, again = trained(tmp_path / "cut", resume=True)
    assert seen == whole[8:]
    assert torch.equal(again, weight)


def steps_of(work_dir: Path, epochs: int, batch_size: int, seed: int | None = None, stops_at: int = -1) -> int:
    """Train by a schedule of torch, one step per iteration; return how many steps it has made."""
    x = torch.ones(8, 2)
    session = Session(work_dir, resume=True, randomness={"seed": seed})
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    data = DataLoader(TensorDataset(x, x[:, :1]), batch_size, shuffle=True)
    model, optimizer, loader = session.prepare(model, optimizer, data, schedulers=schedule)
    with session, suppress(Preempted):
        for _ in session.epochs(epochs):
            for inputs, targets in loader:
                session.step(F.mse_loss(model(inputs), targets))
                schedule.step()
                if session.iter == stops_at:
                    session.run.agreement.ask("a test asks")
    return schedule.last_epoch


def test_a_schedule_of_the_users_goes_on_with_another_global_batch(tmp_path):
    assert steps_of(tmp_path, 1, 2) == 4
    assert steps_of(tmp_path, 2, 4) == 4 + 2
    text = "".join(path.read_text() for path in tmp_path.glob("*/log.txt"))
    assert "schedules that your own code steps go on after the steps they have made" in text


def test_another_seed_in_the_middle_of_an_epoch_is_told(tmp_path):
    steps_of(tmp_path, 1, 2, seed=1, stops_at=2)
    assert steps_of(tmp_path, 1, 2, seed=2) == 4
    text = "".join(path.read_text() for path in tmp_path.glob("*/log.txt"))
    assert "the seed is 2, but was 1 when" in text
    assert "no step of" not in text


def test_a_schedule_without_steps_to_make_in_what_is_left_is_not_told(tmp_path):
    steps_of(tmp_path, 1, 2, stops_at=3)
    assert steps_of(tmp_path, 1, 2) == 4
    assert "no step of" not in "".join(path.read_text() for path in tmp_path.glob("*/log.txt"))


@ranks(2)
def test_each_rank_draws_its_own_numbers_after_a_checkpoint_before_the_first_iteration(tmp_path):
    def drawn(**options) -> list[float]:
        session = Session(tmp_path, randomness={"seed": 3}, **options)
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        data = TensorDataset(torch.ones(8, 2), torch.ones(8, 1))
        model, optimizer, loader = session.prepare(model, optimizer, DataLoader(data, 2))
        numbers = []
        with session:
            for _ in session.epochs(1):
                session.save("before")
                for inputs, targets in loader:
                    numbers.append(torch.rand(1).item())
                    session.step(F.mse_loss(model(inputs), targets))
        return numbers

    first = drawn()
    assert drawn(load_from=str(next(tmp_path.glob("*/before"))), resume=True) == first
    assert all_gather_object(first)[0] != all_gather_object(first)[1]


@pytest.mark.parametrize("name", ["../elsewhere", "/elsewhere", "a/b", ".."])
def test_a_name_that_leads_out_of_the_folder_is_refused(name, tmp_path):
    session, *_ = prepared(tmp_path)
    with session, pytest.raises(ConfigError, match="`name` must be the name of a folder in"):
        session.save(name)


def chained_rates(work_dir: Path, epochs: int, lr: float = 0.1, **options) -> list[float]:
    """Train by a chain of schedules, one step per epoch, with a checkpoint before it; return the rates."""
    session, batches = Session(work_dir, randomness={"seed": 0}, **options), DataLoader(TensorDataset(X, X[:, :1]), 6)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr)
    parts = [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5), torch.optim.lr_scheduler.ConstantLR(optimizer, 0.5, 9)]
    schedule, rates = torch.optim.lr_scheduler.ChainedScheduler(parts), []
    model, optimizer, loader = session.prepare(model, optimizer, batches, schedulers=schedule)
    with session:
        for epoch in session.epochs(epochs):
            for inputs, targets in loader:
                session.step(F.mse_loss(model(inputs), targets))
            session.save(f"rest_{epoch}")
            schedule.step()
            rates.append(optimizer.param_groups[0]["lr"])
    return rates


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")  # of a first step after a resume
def test_a_chain_of_schedules_goes_on_from_before_its_step_and_with_another_rate(tmp_path):
    assert chained_rates(tmp_path, 2) == pytest.approx([0.025, 0.0125])
    rest = next(tmp_path.glob("*/rest_0"))
    assert chained_rates(tmp_path, 2, load_from=str(rest), resume=True) == pytest.approx([0.025, 0.0125])
    assert chained_rates(tmp_path, 3, lr=0.2, resume=True) == pytest.approx([0.0125])


def critic_and_generator(work_dir: Path, *, stops: bool) -> int:
    """Train two models whose windows of two batches never end together; return after how many iterations it ended."""
    session = Session(work_dir, accumulative_counts=2, resume=True, log_level="ERROR", randomness={"seed": 0})
    models = {"generator": nn.Linear(2, 2), "critic": nn.Linear(2, 1)}
    optimizers = {name: torch.optim.SGD(model.parameters(), lr=0.01) for name, model in models.items()}
    data = DataLoader(TensorDataset(torch.ones(120, 2)), batch_size=2)
    model, optimizer, batches = session.prepare(models, optimizers, data)
    try:
        for _ in session.epochs(1):
            for (x,) in batches:
                optimizer["critic"].update_params(model["critic"](model["generator"](x).detach()).mean())
                if session.iter >= 3:
                    model["critic"].requires_grad_(False)
                    optimizer["generator"].update_params(-model["critic"](model["generator"](x)).mean())
                    model["critic"].requires_grad_(True)
                if stops and session.iter == 9:
                    session.run.agreement.ask("a stop")
    except Preempted:
        assert find_last_checkpoint(work_dir) is not None
    return session.iter


@ranks(1, 2)
def test_a_stop_does_not_wait_for_ever_for_windows_that_never_end_together(tmp_path):
    assert 9 < critic_and_generator(tmp_path, stops=True) <= 9 + 5
    assert critic_and_generator(tmp_path, stops=False) == 60 // get_world_size()
