"""What `runner/preemption.py` leaves behind where a stop is asked for while a training ends."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Sampler

from lockstep import Runner, Session
from lockstep.dist import barrier, get_rank, get_world_size
from lockstep.errors import DistError, Preempted
from lockstep.hooks import Hook
from lockstep.runner.preemption import Agreement, stopping_at
from lockstep.testing import ranks, run_ranks
from lockstep.watch.watch import side_store


def ask_at_the_end() -> bool:
    """Rank 1 asks for a stop, and its training ends before the others have answered; return whether a thread stays."""
    agreement, may_listen, listen = Agreement(), threading.Event(), Agreement._listen

    def listen_late(self: Agreement) -> None:
        may_listen.wait()
        listen(self)

    with patch.object(Agreement, "_listen", listen_late):
        if get_rank() == 1:
            may_listen.set()
            with agreement.opened():
                agreement.ask("a save has failed")
                while agreement._reason is None:
                    time.sleep(0.001)
            barrier()
        else:
            with agreement.opened():
                barrier()
                may_listen.set()
    barrier()
    return any(thread.name == "lockstep-agreement" for thread in threading.enumerate())


def test_a_rank_that_asks_while_its_training_ends_leaves_no_thread():
    assert run_ranks(2, ask_at_the_end) == [False, False]


def stops_in_the_second_training() -> int:
    """Rank 0 leaves a validation of the first training early; return how many points a rank passes in the second."""
    agreement = Agreement()
    with agreement.opened(), suppress(Preempted), agreement.evaluation():
        if get_rank() == 0:
            raise Preempted("in the midst")
    barrier()
    passed = 0
    with agreement.opened(), suppress(Preempted):
        if get_rank() == 1:
            agreement.ask("a save has failed")
        while passed < 100:
            agreement.stop_if_asked()
            barrier()
            passed += 1
            time.sleep(0.02)
    return passed


def test_a_second_training_of_a_run_stops_on_all_ranks_after_one_that_was_stopped_in_a_validation():
    first, second = run_ranks(2, stops_in_the_second_training)
    assert first == second < 100


@ranks(2)
def test_no_rank_counts_on_a_store_that_another_one_lacks():
    """A background save, which needs one, is a collective."""
    no_store = DistError("the ranks have no store that can be shared")
    agreement, lacks = Agreement(), nullcontext()
    if get_rank() == 1:
        lacks = patch("lockstep.runner.preemption.side_store", side_effect=no_store)
    with lacks, pytest.raises(DistError, match=r"rank 1: .*no store that can be shared"), agreement.opened():
        pass
    assert not agreement.is_open


class InOrder(Sampler[int]):
    """A sampler of a user's own, of which the ranks compare what they have drawn when they have gone through it."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(5))


class Doubles(nn.Linear):
    def __init__(self) -> None:
        super().__init__(1, 1)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.float().unsqueeze(1))


class AsksWhenTheOtherHasDone(Hook):
    """Asks for a stop on rank 0, which has three batches, when rank 1 has done with its two."""

    def before_val_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        if runner.rank == 0 and batch_idx == 1:
            side_store().wait(["rank 1 has done"])
            time.sleep(0.3)
            runner.agreement.ask("the machine is taken away")
            while runner.agreement._reason is None:
                time.sleep(0.001)
            runner.agreement._is_agreed.wait()

    def after_val_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        if runner.rank == 1 and batch_idx == 1:
            side_store().set("rank 1 has done", "")


@ranks(2)
def test_a_stop_in_a_validation_in_which_one_rank_has_done_comes_on_both(tmp_path: Path):
    numbers = torch.arange(5)
    runner = Runner(
        Doubles(), tmp_path, loss=lambda output, target: output.mean(), train_cfg={"max_epochs": 2},
        train_dataloader=DataLoader([(x, x) for x in numbers], batch_size=1),
        val_dataloader=DataLoader([(x, x) for x in numbers], batch_size=1, sampler=InOrder()),
        optim_wrapper={"optimizer": {"type": "SGD", "lr": 0.1}}, custom_hooks=[AsksWhenTheOtherHasDone()],
        visualizer=[],
    )  # fmt: skip
    with pytest.raises(Preempted):
        runner.train()
    assert runner.run.iter == 3


class Asks(Hook):
    """Asks for a stop in an iteration, or in the validation after one, and waits until it is agreed."""

    def __init__(self, iteration: int, where: str) -> None:
        self.iteration, self.where = iteration, where

    def ask(self, runner: Any) -> None:
        if runner.rank == 0 and self.iteration == runner.iter:
            runner.agreement.ask("the machine is taken away")
            while runner.agreement._reason is None:
                time.sleep(0.001)
            runner.agreement._is_agreed.wait()
            self.iteration = -1

    def before_val_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        if self.where == "validation":
            self.ask(runner)

    def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        if self.where == "training":
            self.ask(runner)


@ranks(1, 2)
@pytest.mark.parametrize(("iteration", "where"), [(3, "training"), (4, "validation")])
def test_a_stop_before_a_validation_in_an_open_window_comes_after_its_update(
    iteration: int, where: str, tmp_path: Path
):
    """An epoch has four iterations, and a window three: one goes from the third of them to the second of the next."""
    data = [(torch.tensor(float(x)),) * 2 for x in range(4 * get_world_size())]
    runner = Runner(
        Doubles(), tmp_path, loss=lambda output, target: output.mean(), train_cfg={"max_epochs": 3},
        train_dataloader=DataLoader(data, batch_size=1), val_dataloader=DataLoader(data, batch_size=1),
        optim_wrapper={"optimizer": {"type": "SGD", "lr": 0.1}, "accumulative_counts": 3},
        custom_hooks=[Asks(iteration, where)], visualizer=[],
    )  # fmt: skip
    with pytest.raises(Preempted):
        runner.train()
    assert runner.run.iter == 6
    assert (runner.run_dir / "iter_6").is_dir()
    log = (runner.run_dir / "log.txt").read_text()
    # epoch_1 is saved before the validation, and iter_6 takes its place where the run is to stop by then.
    assert log.count("epoch_1 is saved inside an accumulation window") == (where == "validation")
    assert log.count("is saved inside") == (where == "validation")


@ranks(1, 2)
def test_a_stop_in_an_evaluation_of_a_session_comes_after_the_update_of_an_open_window(tmp_path: Path):
    session = Session(tmp_path, accumulative_counts=3)
    data = DataLoader([torch.tensor(float(x)) for x in range(4 * session.world_size)], batch_size=1)
    plain = Doubles()
    model, _, loader = session.prepare(plain, torch.optim.SGD(plain.parameters(), lr=0.1), data)
    evaluation = session.prepare_evaluation(data)
    done = 0

    def train() -> None:
        nonlocal done
        for epoch in session.epochs(3):
            for x in loader:
                session.step(model(x).mean())
                done += 1
            for number, x in enumerate(evaluation):
                model(x)
                if (epoch, number) == (0, 1):
                    Asks(done, "").ask(session.run)

    with pytest.raises(Preempted):
        train()
    assert done == 6


def test_signals_that_are_ignored_after_a_stop_leave_handlers_of_others_alone():
    agreement = Agreement()
    agreement.is_open = agreement.has_stopped = True
    before = {number: signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGUSR2)}

    def own(number: int, frame: Any) -> None:
        pass

    try:
        with stopping_at(["SIGUSR1", "SIGUSR2"], agreement):
            pass
        assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN
        signal.signal(signal.SIGUSR1, own)
        with stopping_at(["SIGUSR2"], agreement):
            assert signal.getsignal(signal.SIGUSR2) is not signal.SIG_IGN
        assert signal.getsignal(signal.SIGUSR1) is own
        assert signal.getsignal(signal.SIGUSR2) is signal.SIG_IGN
        with stopping_at([], agreement):  # leaves them as they are
            assert signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
