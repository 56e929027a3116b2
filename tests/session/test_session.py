"""Loops written by hand, on the ranks and strategies of a session."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - as everybody calls it
from tests.runs import Losses
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lockstep import Runner, Session
from lockstep.checkpoint import read_meta
from lockstep.dist import all_gather, all_reduce, get_rank, get_world_size
from lockstep.errors import CollectiveMismatchError, ConfigError
from lockstep.hooks import Hook
from lockstep.testing import ranks

X = torch.randn(22, 4, generator=torch.Generator().manual_seed(1))
Y = (X.sum(1) > 0).long()
STRATEGIES = ["ddp", "fsdp"]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Tanh(), nn.Linear(8, 2))


def loader(**options: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(X, Y), **{"batch_size": 4 // get_world_size(), "shuffle": True, **options})


def session_of(work_dir: Path, **options: Any) -> Session:
    return Session(work_dir, **{"randomness": {"seed": 0}, "log_level": "ERROR", **options})


class Trained:
    """What a loop by hand has trained: as users write it."""

    def __init__(
        self, work_dir: Path, epochs: int = 2, *, save_after: int = 0, data: Any = None, **options: Any
    ) -> None:
        self.losses: dict[int, float] = {}
        self.session = session = session_of(work_dir, **options)
        model = network()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        self.schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
        model, optimizer, batches = session.prepare(model, optimizer, data or loader(), schedulers=[self.schedule])
        for _ in session.epochs(epochs):
            for x, y in batches:
                loss = F.cross_entropy(model(x), y)
                session.step(loss)
                self.losses[session.iter] = loss.item()
                if session.is_update:
                    self.schedule.step()
                if session.iter + 1 == save_after:
                    session.save()
                    session.save("again")
        self.model, self.state = model, session.run.strategy.model_state()

    def weights(self) -> list[Tensor]:
        return [getattr(value, "full_tensor", lambda value=value: value)() for value in self.state.values()]


def assert_equal(one: Trained, other: Trained) -> None:
    for a, b in zip(one.weights(), other.weights(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize(
    "options", [{}, {"accumulative_counts": 2, "clip_grad": {"max_norm": 0.1}}, {"amp": "bfloat16"}]
)
@ranks(1, 2)
def test_a_hand_written_loop_computes_what_a_runner_does(tmp_path, options):
    by_hand = Trained(tmp_path / "session", **options)
    losses = Losses()
    wrapper = {key: value for key, value in options.items() if key != "amp"}
    if "amp" in options:
        wrapper |= {"type": "AmpOptimWrapper", "dtype": "bfloat16"}
    schedule = {"type": "StepLR", "step_size": 3, "gamma": 0.5, "by_epoch": False}
    runner = Runner(
        network(),
        tmp_path / "runner",
        train_dataloader=loader(),
        loss=nn.CrossEntropyLoss(),
        optim_wrapper={"optimizer": {"type": "AdamW", "lr": 0.05}, **wrapper},
        param_scheduler=None if "accumulative_counts" in options else schedule,
        train_cfg={"max_epochs": 2},
        randomness={"seed": 0},
        custom_hooks=[losses],
        strategy="single" if get_world_size() == 1 else {"type": "ddp", "find_unused_parameters": False},
    )
    if "accumulative_counts" in options:
        runner.register_hook(StepsAtUpdates())
    runner.train()
    assert by_hand.losses == losses.by_iter
    assert_same_weights(by_hand.weights(), runner.run.strategy.model_state().values())


class StepsAtUpdates(Hook):
    """Halves the learning rate after every third update, which no schedule of a Runner counts."""

    def before_train(self, runner):
        self.schedule = torch.optim.lr_scheduler.StepLR(runner.optim_wrapper.optimizer, 3, 0.5)

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        if runner.optim_wrapper.should_update():
            self.schedule.step()


def assert_same_weights(one, other):
    for a, b in zip(one, other, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize("strategy", STRATEGIES)
@ranks(2)
def test_each_strategy_trains_the_same_weights(tmp_path, strategy):
    one, other = Trained(tmp_path / "ddp", strategy="ddp"), Trained(tmp_path / strategy, strategy=strategy)
    assert one.losses == pytest.approx(other.losses, abs=1e-6)
    for a, b in zip(one.weights(), other.weights(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


@pytest.mark.parametrize("strategy", STRATEGIES)
@ranks(1, 2)
def test_a_loop_resumes_in_the_middle_of_an_epoch_as_if_it_had_never_ended(tmp_path, strategy):
    whole = Trained(tmp_path / "whole", 3, strategy=strategy)
    Trained(tmp_path / "cut", 3, strategy=strategy, save_after=8)  # of 6 in an epoch
    (saved,) = (tmp_path / "cut").glob("*/again")
    rest = Trained(tmp_path / "rest", 3, strategy=strategy, resume=True, load_from=saved)
    assert {at: loss for at, loss in whole.losses.items() if at >= 8} == rest.losses
    assert_equal(whole, rest)
    assert whole.schedule.last_epoch == rest.schedule.last_epoch == 18


@ranks(2)
def test_a_loop_resumes_its_last_epoch_under_another_strategy(tmp_path):
    whole = Trained(tmp_path / "whole", 3)
    Trained(tmp_path / "moved", 2)
    rest = Trained(tmp_path / "moved", 3, strategy="fsdp", resume=True)
    assert min(rest.losses) == 12
    for a, b in zip(whole.weights(), rest.weights(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


class Uneven:
    """A sampler that knows of ranks, and gives rank 0 more than the others."""

    def __init__(self) -> None:
        self.rank = get_rank()

    def __iter__(self):
        return iter(range(5) if self.rank == 0 else range(5, 8))

    def __len__(self):
        return 5 if self.rank == 0 else 3


@ranks(2)
def test_every_sample_counts_alike_on_ranks_with_unequal_shares(tmp_path):
    data = TensorDataset(X[:8], Y[:8])
    plain = nn.Linear(4, 2)
    torch.manual_seed(0)
    plain.reset_parameters()
    mine = nn.Linear(4, 2)
    mine.load_state_dict(plain.state_dict())
    session = session_of(tmp_path)
    mine, _, batches = session.prepare(
        mine, torch.optim.SGD(mine.parameters(), lr=0.1), DataLoader(data, batch_size=2, sampler=Uneven())
    )
    steps = 0
    for _ in session.epochs(1):
        for x, y in batches:
            steps += 1
            session.step(F.cross_entropy(mine(x), y))
    assert steps == 3
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for rows in ([0, 1, 5, 6], [2, 3, 7], [4]):
        optimizer.zero_grad()
        F.cross_entropy(plain(X[rows]), Y[rows]).backward()
        optimizer.step()
    torch.testing.assert_close(mine.weight, plain.weight)


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
    assert len(val) == len(val.loader)
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


@pytest.mark.parametrize("strategy", STRATEGIES)
@ranks(1, 2)
def test_records_have_the_rates_of_the_update_although_the_loop_steps_its_schedule_after_it(tmp_path, strategy):
    session = session_of(tmp_path, strategy=strategy, default_hooks={"logger": {"interval": 1}})
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    model, _, batches = session.prepare(model, optimizer, loader(), schedulers=schedule)
    for _ in session.epochs(1):
        for x, y in batches:
            session.step(F.cross_entropy(model(x), y))
            schedule.step()
    if session.is_main:
        records = [json.loads(line) for line in (session.run_dir / "metrics.jsonl").read_text().splitlines()]
        rates = [record["lr"] for record in records if record["mode"] == "train"]
        assert rates == [0.5**update for update in range(6)]


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


@pytest.mark.parametrize("strategy", STRATEGIES)
@ranks(2)
def test_models_with_an_optimizer_each_are_trained_in_turn(tmp_path, strategy):
    found = {}
    for kind in ("ddp", strategy):
        session = session_of(tmp_path / kind, strategy=kind)
        torch.manual_seed(0)
        parts = {"one": nn.Linear(4, 4), "two": nn.Linear(4, 2)}
        optimizers = {name: torch.optim.SGD(part.parameters(), lr=0.1) for name, part in parts.items()}
        model, optims, batches = session.prepare(parts, optimizers, loader())
        for _ in session.epochs(2):
            for x, y in batches:
                optims["two"].update_params(F.cross_entropy(model["two"](model["one"](x).detach()), y))
                loss = F.cross_entropy(model["two"](model["one"](x)), y)
                optims["two"].zero_grad()
                optims["one"].update_params(loss)
                optims["two"].zero_grad()
                session.log(loss_one=loss)
                assert optims["one"].should_update()
                with pytest.raises(
                    TypeError, match=r"is_update is for one .* Call optimizers\['one'\]\.should_update\(\)"
                ):
                    _ = session.is_update
        found[kind] = session.run.strategy.model_state()
        with pytest.raises(TypeError, match=r"call one of the models \(one, two\), as in model\['one'\]"):
            model(X)
    for a, b in zip(found["ddp"].values(), found[strategy].values(), strict=True):
        torch.testing.assert_close(a, b.full_tensor() if hasattr(b, "full_tensor") else b, rtol=0, atol=1e-6)


@ranks(2)
def test_a_part_that_is_called_by_itself_is_averaged_too(tmp_path):
    session = session_of(tmp_path)
    model = network()
    model, _, batches = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader())
    for _ in session.epochs(1):
        for x, y in batches:
            hidden = model[0](x)
            session.step(F.cross_entropy(model[3](hidden.tanh()), y))
    for weight in model.parameters():
        one, other = all_gather(weight.detach())
        assert torch.equal(one, other)


@ranks(1, 2)
def test_a_penalty_on_gradients_is_that_of_a_loop_for_one_process(tmp_path):
    session = session_of(tmp_path)
    model, plain = network()[3], network()[3]
    model, _, batches = session.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(X8, batch_size=4 // get_world_size())
    )
    for _ in session.epochs(2):
        for x in batches:
            session.step(with_penalty(model, x))
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for x in (X8[:4], X8[4:]) * 2:
        optimizer.zero_grad()
        with_penalty(plain, x).backward()
        optimizer.step()
    torch.testing.assert_close(model.weight, plain.weight)


X8 = torch.randn(8, 8, generator=torch.Generator().manual_seed(1))


def with_penalty(model: nn.Module, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    outputs = model(x).tanh()
    (slopes,) = torch.autograd.grad(outputs.sum(), x, create_graph=True)
    return outputs.square().mean() + slopes.square().sum(1).mean()


@ranks(2)
def test_a_penalty_on_gradients_is_refused_under_fsdp(tmp_path):
    session = session_of(tmp_path, strategy={"type": "fsdp", "auto_wrap_policy": {nn.Linear}})
    model: nn.Module = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    model, _, batches = session.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(X8, batch_size=4 // get_world_size())
    )
    for _ in session.epochs(1):
        for x in batches:
            with pytest.raises(ConfigError, match=r"must not be differentiated again .* FSDP .* Use strategy 'ddp'"):
                with_penalty(model, x)
            if get_world_size() > 1:  # torch's state of that pass remains, and would keep gradients on their ranks
                with pytest.raises(ConfigError, match="After a backward pass that has failed, FSDP can't go on"):
                    session.step(model(x).square().mean())
            break


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


def test_an_epoch_may_be_left_early_and_training_stopped(tmp_path):
    session = session_of(tmp_path)
    model = network()
    model, _, batches = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader())
    seen = []
    for epoch in session.epochs(5):
        for x, y in batches:
            session.step(F.cross_entropy(model(x), y))
            seen.append(epoch)
            if seen.count(epoch) == 2:
                session.save(f"left_{epoch}")
                break
        if epoch == 1:
            session.stop()
            session.save("by_hand")
    assert seen == [0, 0, 1, 1]
    assert (session.run_dir / "by_hand").is_dir()
    assert read_meta(session.run_dir / "left_1")["iter"] == 8
    assert session.iter == 12


def test_what_is_called_in_the_wrong_place_says_so(tmp_path):
    session = session_of(tmp_path)
    with pytest.raises(RuntimeError, match="prepare\\(model, optimizer, dataloader\\) must be called first"):
        session.step(torch.zeros(()))
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, _, batches = session.prepare(model, optimizer, loader())
    with pytest.raises(RuntimeError, match=r"once in each of session\.epochs.*, but none has begun\. To look at"):
        next(iter(batches))
    with pytest.raises(RuntimeError, match="a session trains one model"):
        session.prepare(model, optimizer, loader())
    with pytest.raises(RuntimeError, match="but epoch 0 has not begun to"):
        for _ in session.epochs(2):
            pass
    with pytest.raises(RuntimeError, match="so that no Runner can train it"):
        model.train_step(None, None)


def test_a_value_of_no_iteration_is_refused(tmp_path):
    session = session_of(tmp_path)
    model = network()
    model, _, batches = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader())
    evaluated = session.prepare_evaluation(loader())

    def log(where: str) -> None:
        with pytest.raises(
            RuntimeError, match=rf"but was called in {where} \(rank 0 of 1\)\. Record what a validation"
        ):
            session.log(val_loss=1.0)

    log("no iteration")
    for epoch in session.epochs(2):
        for x, y in batches:
            session.step(F.cross_entropy(model(x), y))
            for _ in evaluated:
                log(r"a pass over a loader of prepare_evaluation\(\)")
                break
            session.log(kept=1.0)
            if epoch:
                break
        if epoch:
            session.log(last=2.0)  # of the iteration that was left by `break`
        else:
            log("no iteration")
    records = [json.loads(line) for line in (session.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert "val_loss" not in {name for record in records for name in record}
    assert (records[-1]["kept"], records[-1]["last"]) == (1.0, 2.0)


@ranks(1, 3)
def test_a_pass_over_evaluation_data_within_another_is_refused(tmp_path):
    session = session_of(tmp_path)
    model = network()
    session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader())
    one, other = session.prepare_evaluation(loader()), session.prepare_evaluation(loader())
    with pytest.raises(RuntimeError, match=r"began within another one.* \(rank . of .\)\. Go through one after the"):
        next(zip(one, other, strict=True))
    assert len(torch.cat([session.gather(y) for x, y in one])) == len(X)


@ranks(1, 2)
def test_batches_of_an_update_may_become_more_with_the_epochs(tmp_path):
    session = session_of(tmp_path)
    model, by_hand = network(), network()
    model[1].p = by_hand[1].p = 0.0
    batches = DataLoader(TensorDataset(X[:20], Y[:20]), batch_size=4 // get_world_size())
    model, optimizer, batches = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), batches)
    updates = []
    for epoch in session.epochs(3):
        optimizer.accumulative_counts = epoch + 1
        for x, y in batches:
            session.step(F.cross_entropy(model(x), y))
            updates += [session.iter + 1] * session.is_update
    assert updates == [1, 2, 3, 4, 5, 7, 9, 11, 14, 15]  # a window of two goes on over the end of its epoch
    plain, done = torch.optim.SGD(by_hand.parameters(), lr=0.1), 0
    for end in updates:
        places = [i % 5 for i in range(done, end)]
        loss = sum(F.cross_entropy(by_hand(X[4 * i : 4 * i + 4]), Y[4 * i : 4 * i + 4]) for i in places) / len(places)
        plain.zero_grad()
        loss.backward()
        plain.step()
        done = end
    for own, other in zip(model.parameters(), by_hand.parameters(), strict=True):
        torch.testing.assert_close(own, other)


@pytest.mark.parametrize(
    ("loss", "values", "error", "says"),
    [
        (lambda loss: loss.detach(), {}, ValueError, r"requires no gradient \(rank 0 of 1\)"),
        (lambda loss: loss.item(), {}, TypeError, r"must be a scalar tensor, but is the number .* \(rank 0 of 1\)"),
        (lambda loss: loss.expand(3), {}, ValueError, r"the loss must be a scalar, but has shape \(3,\)"),
        (lambda loss: {"accuracy": loss}, {}, TypeError, "at least one entry whose name contains 'loss'"),
        (lambda loss: loss, {"name": "cat"}, TypeError, "`name` must be a number or a scalar tensor to be recorded"),
        (lambda loss: loss, {"all": torch.ones(2)}, TypeError, r"`all` must be .* but is of shape \(2,\)"),
        (lambda loss: loss * float("nan"), {}, FloatingPointError, "the loss must be finite"),
    ],
)
def test_what_is_no_loss_says_so(tmp_path, loss, values, error, says):
    session = session_of(tmp_path)
    model = network()
    model, _, batches = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader())

    def train() -> None:
        for _ in session.epochs(1):
            for x, y in batches:
                session.step(loss(F.cross_entropy(model(x), y)), **values)

    with pytest.raises(error, match=says):
        train()


def test_what_a_model_returns_is_a_loss_too(tmp_path):
    session = session_of(tmp_path, default_hooks={"logger": {"interval": 1}})
    model = network()
    model, _, batches = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader())
    for _ in session.epochs(1):
        for x, y in batches:
            session.step({"loss_a": F.cross_entropy(model(x), y), "loss_b": model(x).square().mean()})
    record = json.loads((session.run_dir / "metrics.jsonl").read_text().splitlines()[0])
    assert record["loss"] == pytest.approx(record["loss_a"] + record["loss_b"])


class OfTransformers(nn.Linear):
    """Computes its loss of labels alone, as models of transformers do."""

    def forward(self, x: Tensor, labels: Tensor | None = None) -> SimpleNamespace:
        logits = super().forward(x)
        return SimpleNamespace(logits=logits, loss=None if labels is None else F.cross_entropy(logits, labels))


def test_a_batch_without_labels_for_a_model_that_needs_them_is_told(tmp_path):
    session = session_of(tmp_path)
    model = OfTransformers(4, 2)
    data = [{"x": x} for x in X]
    model, _, batches = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(data, 4))
    says = r"only of `labels`, but the batch has only x\. .* \(rank 0 of 1\)"

    def train() -> None:
        for _ in session.epochs(1):
            for batch in batches:
                session.step(model(**batch))

    with pytest.raises(TypeError, match=says):
        train()


@ranks(2)
def test_a_backward_pass_around_the_session_is_an_error(tmp_path):
    session = session_of(tmp_path)
    model = network()
    model, _, batches = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader())
    next(session.epochs(1))
    turns = iter(batches)
    x, y = next(turns)
    F.cross_entropy(model[3](model[0](x)), y).backward()
    with torch.no_grad():
        model[0].weight -= 0.1 * model[0].weight.grad
    with pytest.raises(RuntimeError, match="with gradients that were not averaged"):
        next(turns)


def test_data_without_a_batch_and_what_is_no_model_are_refused(tmp_path):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match=r"`dataloader` must yield .*, but yields none: .* drop_last"):
        session_of(tmp_path).prepare(model, optimizer, DataLoader(X[:1], batch_size=2, drop_last=True))
    for wrong in (3, {"one": 3}):
        with pytest.raises(TypeError, match=r"`model` must be a torch\.nn\.Module or a dict of modules"):
            session_of(tmp_path).prepare(wrong, optimizer, loader())


@pytest.mark.parametrize("strategy", [None, "fsdp"])
@ranks(2)
def test_an_optimizer_of_another_model_is_refused(tmp_path, strategy):
    session = session_of(tmp_path, strategy=strategy)
    optimizer = torch.optim.SGD(network().parameters(), lr=0.1)
    with pytest.raises(ConfigError, match=r"`optimizer` must .*(SGD updates none of them|parameters of another model)"):
        session.prepare(network(), optimizer, loader())


def test_wrong_options_are_refused_before_anything_is_made(tmp_path):
    for name in ("optim_wrapper", "val_cfg", "data_preprocessor", "max_epochs", "sed"):
        with pytest.raises(TypeError, match=rf"a Session has no argument `{name}`\. What .*session\.epochs\(count\)"):
            Session(tmp_path, **{name: {}})
    for name, meant in (("accumulative_count", "accumulative_counts"), ("precision", "amp")):
        with pytest.raises(TypeError, match=f"a Session has no argument `{name}`: did you mean `{meant}`"):
            Session(tmp_path, **{name: 3})
    assert not list(tmp_path.iterdir())


class Stream(IterableDataset):
    def __iter__(self):
        return iter(zip(X, Y, strict=True))


def stream_losses(tmp_path, count, **options):
    """Return the losses of a session by iterations over a stream, by iteration."""
    session = session_of(tmp_path, **options)
    model = network()
    data = {"dataset": Stream(), "batch_size": 4 // get_world_size()}
    model, _, _ = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), data)
    losses = {}
    for inputs, targets in session.iterations(count):
        loss = F.cross_entropy(model(inputs), targets)
        session.step(loss)
        losses[session.iter] = loss.item()
    return losses


@ranks(1, 2)
def test_a_stream_is_counted_in_iterations_over_passes_and_resumes_within_one(tmp_path):
    whole = stream_losses(tmp_path / "whole", 13)  # 6 batches a pass
    assert list(whole) == list(range(13))
    first, rest = stream_losses(tmp_path / "parts", 10), stream_losses(tmp_path / "parts", 13, resume=True)
    assert list(rest) == [10, 11, 12]
    assert first | rest == whole


def test_a_loader_without_a_length_is_not_counted_in_epochs_and_one_with_a_length_may_be_in_iterations(tmp_path):
    session = session_of(tmp_path)
    model = network()
    session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(Stream()))
    with session, pytest.raises(ConfigError, match="epochs must be those of a data loader with a length, but"):
        next(session.epochs(1))
    losses = []
    for count, resume in ((8, False), (11, True)):  # of 6 in a pass
        other = session_of(tmp_path / "other", resume=resume)
        model = network()
        model, _, _ = other.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader())
        for x, y in other.iterations(count):
            losses.append(F.cross_entropy(model(x), y))
            other.step(losses[-1])
        assert (other.iter, other.epoch) == (count, 1)
        assert (other.run_dir / f"iter_{count}").is_dir()
    assert len(losses) == 11


def without_data(work_dir, count, **options):
    """Return what a loop that makes its own data yields, with its losses."""
    session = session_of(work_dir, default_hooks={"logger": {"interval": 1}}, **options)
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda steps: 1 / (1 + steps))
    model, _ = session.prepare(model, optimizer, schedulers=schedule)
    losses = {}
    for number in session.iterations(count):
        loss = model(torch.rand(2, 4)).square().mean()
        session.step(loss)
        schedule.step()
        losses[number] = loss.item()
    return session, losses


@ranks(1, 2)
def test_a_loop_that_makes_its_data_itself_is_counted_recorded_saved_and_resumed(tmp_path):
    session, whole = without_data(tmp_path / "whole", 7)
    assert list(whole) == list(range(7))
    if session.is_main:
        lines = (session.run_dir / "metrics.jsonl").read_text().splitlines()
        assert [record["iter"] for record in map(json.loads, lines) if record["mode"] == "train"] == list(range(1, 8))
    _, first = without_data(tmp_path / "parts", 4)
    _, rest = without_data(tmp_path / "parts", 7, resume=True)
    assert list(rest) == [4, 5, 6]
    assert first | rest == whole
    with pytest.raises(
        ConfigError, match="epochs must be those of a data loader with a length, but none was handed in"
    ):
        next(session.epochs(1))


def test_optimizers_by_names_that_no_part_of_the_model_has_are_refused(tmp_path):
    model = network()
    optimizers = {"0": torch.optim.Adam(model[0].parameters()), "last": torch.optim.SGD(model[3].parameters())}
    with pytest.raises(ConfigError, match=r"parts of the model, 0, 1, 2, 3, but has others: last"):
        session_of(tmp_path).prepare(model, optimizers, loader())


def test_a_count_of_batches_is_refused_where_there_are_none(tmp_path):
    model = network()
    with pytest.raises(ConfigError, match=r"`batch_size_of` must be None where prepare\(\) gets no data loader"):
        session_of(tmp_path, batch_size_of=len).prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))


@ranks(2)
def test_a_loop_without_data_may_take_the_mean_over_what_all_ranks_have_made(tmp_path):
    session = session_of(tmp_path)
    model, plain = nn.Linear(4, 2), nn.Linear(4, 2)
    plain.load_state_dict(model.state_dict())
    model, _ = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    share = slice(0, 3) if session.rank == 0 else slice(3, 10)
    for _ in session.iterations(1):
        losses = F.cross_entropy(model(X[share]), Y[share], reduction="none")
        n = torch.tensor(len(losses))
        all_reduce(n)
        session.step(losses.sum() * session.world_size / n)
    F.cross_entropy(plain(X[:10]), Y[:10]).backward()
    for own, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(own, expected - 0.1 * expected.grad)


def test_names_of_accelerate_are_told_what_to_do_instead(tmp_path):
    session = Session(tmp_path, log_level="ERROR")
    with pytest.raises(AttributeError, match=r"no attribute 'backward': did you mean `step`"):
        session.backward(torch.ones(1))
    with pytest.raises(AttributeError, match="no attribute 'prepar': did you mean `prepare`"):
        _ = session.prepar
    with pytest.raises(AttributeError, match=r"no attribute 'gathered'(?!.*__)"):
        _ = session.gathered
    with pytest.raises(AttributeError, match=r"no attribute 'reduce'\. .* see docs/side-by-side"):
        _ = session.reduce
    model = network()
    _, _, batches = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader())
    assert batches.batch_size == batches.loader.batch_size
    with pytest.raises(TypeError, match=r"got a tuple .*\. Hand them in one by one, as in predictions, labels = "):
        session.gather((torch.ones(2), torch.ones(2)))


def test_an_attribute_error_within_a_property_is_the_one_that_is_raised(tmp_path):
    class Own(Session):
        @property
        def best(self) -> float:
            return self.nothing_like_it

    with pytest.raises(AttributeError, match="no attribute 'nothing_like_it'"):
        _ = Own(tmp_path, log_level="ERROR").best


def test_a_second_pass_within_an_epoch_is_refused_and_not_counted_as_the_next_one(tmp_path):
    session = session_of(tmp_path)
    model = network()
    model, _, batches = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader())
    with session:
        turns = session.epochs(3)
        next(turns)
        for x, y in batches:
            session.step(F.cross_entropy(model(x), y))
        with pytest.raises(RuntimeError, match="but this is one more"):
            next(iter(batches))
    assert session.epoch == 1


@ranks(2, fresh=True)
def test_a_rank_that_leaves_an_epoch_alone_is_told_so(tmp_path):
    session = session_of(tmp_path)
    model = network()
    model, _, batches = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader())

    def train() -> None:
        with session:
            for _ in session.epochs(2):
                for x, y in batches:
                    session.step(F.cross_entropy(model(x), y))
                    if session.iter == 1 and get_rank() == 1:
                        break

    with pytest.raises(CollectiveMismatchError, match="a loop is left in the same iteration on all") as raised:
        train()
    if get_rank() == 1:
        assert "Rank 1 has left the loop after 2 iterations, by `break`" in str(raised.value.__notes__)
        assert "after 2 iterations" in str(raised.value.__notes__)


@ranks(2)
def test_a_stop_that_one_rank_asks_for_ends_all_after_the_epoch(tmp_path):
    session = session_of(tmp_path)
    model = network()
    model, _, batches = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader())
    for _ in session.epochs(3):
        for x, y in batches:
            session.step(F.cross_entropy(model(x), y))
        if get_rank() == 1:
            session.stop()
    assert session.epoch == 1


def test_a_scheduler_over_the_wrapper_says_over_what_it_is_made(tmp_path):
    model = network()
    session = Session(tmp_path)
    model, wrapper = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(TypeError, match="is not an Optimizer"), session:
        torch.optim.lr_scheduler.StepLR(wrapper, 1)
    log = (session.run_dir / "log.txt").read_text()
    assert "a scheduler takes your own optimizer" in log


@pytest.mark.parametrize("is_made", ["before", "before and handed in", "after"])
def test_a_scheduler_that_is_not_handed_in_is_told(tmp_path, is_made):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedules = [] if is_made == "after" else [torch.optim.lr_scheduler.StepLR(optimizer, 10)]
    session = Session(tmp_path)
    handed_in = schedules if is_made == "before and handed in" else []
    _, wrappers = session.prepare({"net": model}, {"net": optimizer}, schedulers=handed_in)
    if is_made == "after":
        torch.optim.lr_scheduler.StepLR(wrappers["net"].optimizer, 10)
    next(session.iterations(1))
    told = "SGD has a scheduler that is not handed to prepare(..., schedulers=...), before which it must be made"
    assert (told in (session.run_dir / "log.txt").read_text()) is not bool(handed_in)


class OfAccelerate(torch.optim.SGD):
    """Stands for an optimizer that accelerate has prepared."""

    __module__ = "accelerate.optimizer"


@pytest.mark.parametrize("epochs", [1, 3])
@pytest.mark.parametrize("steps", [False, True])
def test_a_scheduler_that_is_never_stepped_is_told_once(tmp_path, epochs, steps):
    with session_of(tmp_path, log_level="WARNING") as session:
        optimizer = torch.optim.SGD((model := network()).parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        model, _, batches = session.prepare(model, optimizer, loader(), schedulers=scheduler)
        for _ in session.epochs(epochs):
            for x, y in batches:
                session.step(F.cross_entropy(model(x), y))
            if steps:
                scheduler.step()
    log = (session.run.run_dir / "log.txt").read_text()
    assert log.count("no step of StepLR since the training began: call scheduler.step()") == (not steps)


def test_of_two_schedulers_of_a_class_the_one_that_is_never_stepped_is_told(tmp_path):
    with session_of(tmp_path, log_level="WARNING") as session:
        optimizer = torch.optim.SGD((model := network()).parameters(), lr=0.1)
        schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, size) for size in (1, 2)]
        model, _, batches = session.prepare(model, optimizer, loader(), schedulers=schedulers)
        for _ in session.epochs(1):
            for x, y in batches:
                session.step(F.cross_entropy(model(x), y))
            schedulers[1].step()
    assert "no step of StepLR since" in (session.run.run_dir / "log.txt").read_text()


def test_what_has_been_prepared_already_is_refused(tmp_path):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = session_of(tmp_path)
    model, wrapper, batches = session.prepare(model, optimizer, loader())
    for given, name in ((wrapper, "optimizer"), (batches, "dataloader")):
        with pytest.raises(TypeError, match=rf"`{name}` must be your own, .*, which prepare\(\) has returned before"):
            session_of(tmp_path).prepare(network(), **{"optimizer": optimizer, "dataloader": loader(), name: given})
    prepared = OfAccelerate(model.parameters(), lr=0.1)
    says = r" must be your own, but is accelerate's OfAccelerate\. Hand in what you gave to its prepare\(\)"
    with pytest.raises(TypeError, match="`optimizer`" + says):
        session_of(tmp_path).prepare(network(), prepared)
    with pytest.raises(TypeError, match="`optim_wrapper`" + says):
        Runner(model, tmp_path, optim_wrapper=prepared)


def test_what_is_no_scheduler_is_refused(tmp_path):
    model = network()
    with pytest.raises(TypeError, match=r"`schedulers` must have state_dict\(\) and .* before prepare\(\)"):
        session_of(tmp_path).prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), schedulers=[{"type": 1}])


def test_an_error_in_the_loop_closes_the_session(tmp_path):
    closed = []

    class Notes(Hook):
        def close(self):
            closed.append(True)

    def broken() -> None:
        with session_of(tmp_path, custom_hooks=[Notes()]) as session:
            model = network()
            model, _, batches = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader())
            for _ in session.epochs(2):
                for x, y in batches:
                    session.step(F.cross_entropy(model(x), y))
                    if session.iter == 2:
                        raise ValueError("of the user's own")

    with pytest.raises(ValueError, match="of the user's own") as caught:
        broken()
    assert closed
    assert caught.value.__notes__ == ["(rank 0 of 1, after 2 iterations)"]
    records = list(tmp_path.glob("*/log.txt"))
    assert len(records) == 1


@ranks(1, 2)
def test_an_update_is_the_mean_over_what_batch_size_of_counts(tmp_path: Path) -> None:
    x = torch.randn(16, 6, generator=torch.Generator().manual_seed(2))
    tokens = torch.arange(6) < 1 + torch.arange(16)[:, None] % 6  # from one to six of each sample count

    def loss_of(model: nn.Module, values: Tensor, counted: Tensor) -> Tensor:
        return model(values[counted][:, None]).square().mean()

    session = session_of(tmp_path, accumulative_counts=2, batch_size_of=lambda batch: int(batch[1].sum()))
    model = nn.Linear(1, 1)
    plain = nn.Linear(1, 1)
    plain.load_state_dict(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = DataLoader(TensorDataset(x, tokens), batch_size=8 // get_world_size())
    model, _, batches = session.prepare(model, optimizer, data)
    for _ in session.epochs(1):
        for batch in batches:
            session.step(loss_of(model, *batch))
    loss_of(plain, x, tokens).backward()
    for own, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(own, expected - 0.1 * expected.grad)


@ranks(1, 2)
def test_hooks_see_the_iteration_in_which_an_epoch_is_left_by_break(tmp_path):
    average = {"type": "EMAHook", "momentum": 0.5}
    session = session_of(tmp_path, custom_hooks=[average], default_hooks={"logger": {"interval": 1}})
    model = nn.Linear(8, 1, bias=False)
    data = DataLoader(X8, batch_size=4 // get_world_size())
    model, _, batches = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), data)
    held_out, expected, losses = session.prepare_evaluation(data), None, []
    for _ in session.epochs(2):
        for x in batches:
            loss = model(x).square().mean()
            session.step(loss)
            losses.append(loss.item())
            now = model.weight.detach().clone()
            expected = now if expected is None else (expected + now) / 2
            if session.batch_idx == 1:
                break
        for _ in held_out:
            assert torch.allclose(model.weight, expected)
    if session.is_main:
        records = map(json.loads, (session.run_dir / "metrics.jsonl").read_text().splitlines())
        assert len([one for one in records if one["mode"] == "train"]) == len(losses) == 4


@ranks(2)
def test_weights_are_averaged_under_fsdp_after_a_validation_within_a_window(tmp_path):
    average = {"type": "EMAHook", "momentum": 0.5}
    session = session_of(tmp_path, strategy="fsdp", accumulative_counts=4, custom_hooks=[average])
    model, data = nn.Linear(8, 1), DataLoader(X8, batch_size=1)
    model, _, _ = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), data)
    held_out = session.prepare_evaluation(data)
    for x in session.iterations(4):
        session.step(model(x).square().mean())
        model.eval()
        with torch.no_grad():
            _ = [model(one) for one in held_out]
        model.train()
    assert session.iter == 4
