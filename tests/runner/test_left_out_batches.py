"""A batch that one rank leaves out: it counts for nothing, or all ranks learn which rank has left it out, and where."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lockstep import Runner, Session
from lockstep.dist import all_gather_object, get_rank
from lockstep.testing import RankFailure, ranks, run_ranks

X = torch.linspace(-1, 1, 16).reshape(8, 2)
DDP_UNUSED = {"type": "ddp", "find_unused_parameters": True}


class Net(nn.Module):
    """Leaves out the second batch of rank 1 in a way of its own."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 1)
        nn.init.constant_(self.linear.weight, 0.5)
        nn.init.constant_(self.linear.bias, 0.1)
        self.how, self.count = how, 0

    def is_left_out(self) -> bool:
        self.count += 1
        return self.count == 2 and get_rank() == 1

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).square().mean()


class Stepping(Net):
    def train_step(self, data: Any, optim_wrapper: Any) -> Any:
        is_left_out = self.is_left_out()
        if is_left_out and self.how == "none":
            return None
        with optim_wrapper.optim_context(self):
            loss = self(data[0])
        if is_left_out:
            loss = {"zero": torch.zeros((), requires_grad=True), "detached": torch.zeros(()), "times": loss * 0}[
                self.how
            ]
        optim_wrapper.update_params(loss)
        return {"loss": loss.detach()}


def run(folder: Path, how: str, strategy: Any, count: int = 4) -> list[float]:
    """Train for some iterations, and return the weights."""
    torch.manual_seed(0)
    loader = DataLoader(TensorDataset(X), batch_size=1)
    if how == "continue":
        session = Session(folder, strategy=strategy, log_level="ERROR", visualizer=[])
        model = Net(how)
        model, _, prepared = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
        for _ in session.epochs(1):
            for (x,) in prepared:
                if not model.is_left_out():
                    session.step(model(x))
    else:
        model = Stepping(how)
        Runner(
            model, folder, train_dataloader=loader, train_cfg={"max_epochs": 1}, strategy=strategy, visualizer=[],
            optim_wrapper={"optimizer": {"type": "SGD", "lr": 0.1}}, default_hooks={"checkpoint": None},
            log_level="ERROR",
        ).train()  # fmt: skip
    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    return [value for one in whole for value in one.detach().flatten().tolist()]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("how", ["continue", "none"])
def test_all_ranks_learn_which_rank_has_left_out_a_batch(how: str, strategy: str, tmp_path: Path):
    with pytest.raises(RankFailure) as caught:
        run_ranks(2, run, tmp_path, how, strategy)
    assert {report.rank for report in caught.value.reports} == {0, 1}
    for report in caught.value.reports:
        assert "CollectiveMismatchError: ranks of the default group (2) must make the same call" in report.detail
        assert "rank 1: step_without_backward_pass(to leave out a batch, multiply its loss by 0)" in report.detail


def by_hand() -> list[float]:
    """Return the weights after the same updates in one process, in which the left out batch counts for nothing."""
    model = Net("")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for index in range(4):
        losses = [model(X[2 * index + rank][None]) * (0.0 if (index, rank) == (1, 1) else 1.0) for rank in range(2)]
        ((losses[0] + losses[1]) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [value for one in model.parameters() for value in one.detach().flatten().tolist()]


@ranks(2)
@pytest.mark.parametrize(
    ("how", "strategy"), [("times", "ddp"), ("times", "fsdp"), ("zero", "ddp"), ("zero", DDP_UNUSED)]
)
def test_a_loss_of_zero_counts_for_nothing(how: str, strategy: Any, tmp_path: Path):
    for weights in all_gather_object(run(tmp_path, how, strategy)):
        assert weights == pytest.approx(by_hand(), abs=1e-6)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_detached_loss_is_named_with_its_rank(strategy: str, tmp_path: Path):
    with pytest.raises(RankFailure, match="rank 1 raised") as caught:
        run_ranks(2, run, tmp_path, "detached", strategy)
    assert "requires no gradient (rank 1 of 2)" in caught.value.reports[0].detail


@ranks(1, 2)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_all_ranks_may_leave_out_a_batch(strategy: str, tmp_path: Path):
    with Session(tmp_path, strategy=strategy, log_level="ERROR", visualizer=[]) as session:
        model = Net("")
        model, _, loader = session.prepare(
            model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(TensorDataset(X), batch_size=1)
        )
        for _ in session.epochs(1):
            for index, (x,) in enumerate(loader):
                if index % 2 == 0:
                    session.step(model(x))
        assert session.iter in (4, 8)
