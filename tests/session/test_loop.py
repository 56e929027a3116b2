"""Epochs and iterations of a loop by hand: which come, how they end, and how they are resumed."""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - as everybody calls it
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lockstep.checkpoint import read_meta
from lockstep.dist import all_reduce, get_rank, get_world_size
from lockstep.errors import CollectiveMismatchError, ConfigError
from lockstep.hooks import Hook
from lockstep.testing import ranks

from .by_hand import STRATEGIES, X8, Trained, X, Y, assert_equal, loader, network, session_of


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
    assert steps == len(batches) == 3
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for rows in ([0, 1, 5, 6], [2, 3, 7], [4]):
        optimizer.zero_grad()
        F.cross_entropy(plain(X[rows]), Y[rows]).backward()
        optimizer.step()
    torch.testing.assert_close(mine.weight, plain.weight)


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
    with pytest.raises(RuntimeError, match=r"session\.step\(\) makes the update of a training iteration, but was"):
        session.step(next(model.parameters()).sum())
    assert not session.is_update
    for epoch in session.epochs(2):
        for x, y in batches:
            assert not session.is_update
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


class Shrinking:
    """A batch sampler with a batch less in each epoch."""

    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return 4 - self.epoch

    def __iter__(self):
        return iter([[number, number + 1] for number in range(len(self))])


@ranks(1, 2)
def test_an_epoch_that_ends_before_its_length_says_so(tmp_path):
    session = session_of(tmp_path)
    model = network()
    data = DataLoader(TensorDataset(X, Y), batch_sampler=Shrinking())
    model, _, batches = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), data)
    for _ in session.epochs(3):
        for x, y in batches:
            session.step(F.cross_entropy(model(x), y))
    if get_rank() == 0:
        wanted, had = (4, 2) if get_world_size() == 1 else (2, 1)
        log = (session.run_dir / "log.txt").read_text()
        assert (
            f"have {wanted} iterations in every epoch, as its length says, but had {had} in epoch 3, after which `"
            in log
        )


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


@pytest.mark.parametrize("where", ["before the batches", "after the batches"])
@ranks(1, 2)
def test_a_group_that_the_body_adds_to_the_optimizer_is_added_again_by_a_resumed_one(tmp_path, where):
    def train(work_dir, **options):
        losses = {}
        with session_of(work_dir, log_level="INFO", **options) as session:
            (model := network())[0].requires_grad_(False)
            optimizer = torch.optim.SGD(model[3].parameters(), lr=0.5)
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
            model, optimizer, batches = session.prepare(model, optimizer, loader(), schedulers=schedule)

            def unfreeze():
                model[0].requires_grad_(True)
                optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 0.1})

            for epoch in session.epochs(3):
                if where == "before the batches" and epoch == 1:
                    unfreeze()
                for x, y in batches:
                    loss = F.cross_entropy(model(x), y)
                    session.step(loss)
                    losses[session.iter] = loss.item()
                    if where == "before the batches" and session.iter == 7:  # of 6 in an epoch
                        session.save("saved")
                if where == "after the batches" and epoch == 1:
                    unfreeze()
                    session.save("saved")
                schedule.step()
        return losses, session

    whole, session = train(tmp_path / "whole")
    rest, resumed = train(tmp_path / "rest", resume=True, load_from=session.run_dir / "saved")
    assert rest == {at: loss for at, loss in whole.items() if at >= (8 if where == "before the batches" else 12)}
    if session.is_main:
        assert "are those of the checkpoint" not in (resumed.run_dir / "log.txt").read_text()  # nothing was undone
