"""Schedules that count batches stand still where float16 skips updates, on the CPU, whose scaler is torch's, too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lockstep import Runner, Session
from lockstep.dist import get_world_size
from lockstep.hooks import Hook
from lockstep.optim import AmpOptimWrapper
from lockstep.testing import ranks

X = torch.ones(32, 2)
SCALE = {"init_scale": 2.0**12, "growth_interval": 1000}  # skips some updates, then none


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(2, 1)

    def forward(self, x: Tensor, mode: str = "loss") -> Any:
        return 100 * self.linear(x).square().mean()


class Rates(Hook):
    """Notes the learning rate of each iteration, and whether its update was made."""

    def __init__(self) -> None:
        self.seen: list[tuple[float, bool]] = []

    def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        self.rate = runner.optim_wrapper.param_groups[0]["lr"]

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        self.seen.append((self.rate, not runner.optim_wrapper.has_skipped))


def train(work_dir: Path, strategy: str, optimizer: Any = None, **changes: Any) -> list[tuple[float, bool]]:
    rates = Rates()
    wrapper = {"type": "AmpOptimWrapper", "dtype": "float16", "loss_scale": SCALE, **changes.pop("wrapper", {})}
    Runner(
        Net(),
        work_dir,
        train_dataloader={"dataset": TensorDataset(X), "batch_size": 2 // get_world_size()},
        train_cfg={"max_epochs": 1},
        optim_wrapper={"optimizer": optimizer or {"type": "AdamW", "lr": 1.0}, **wrapper},
        param_scheduler={"type": "LinearLR", "start_factor": 0.1, "total_iters": 9, "by_epoch": False},
        strategy="ddp" if strategy == "single" and get_world_size() > 1 else strategy,
        custom_hooks=[rates],
        randomness={"seed": 0},
        visualizer=[],
        log_level="ERROR",
        **changes,
    ).train()
    return rates.seen


@pytest.mark.parametrize("strategy", ["single", "fsdp"])
@pytest.mark.parametrize("options", [{}, {"fused": True}])
@ranks(1, 2)
def test_the_updates_that_are_made_have_the_rates_of_the_schedule(tmp_path, strategy, options):
    seen = train(tmp_path, strategy, {"type": "AdamW", "lr": 1.0, **options})
    made = [rate for rate, is_made in seen if is_made]
    assert 1 < len(made) < len(seen)
    assert made[:10] == pytest.approx([0.1 * step for step in range(1, 11)][: len(made)])


@ranks(1, 2)
def test_a_skipped_window_counts_none_of_its_batches(tmp_path):
    seen = train(tmp_path, "single", wrapper={"accumulative_counts": 2})
    updates = seen[1::2]
    skipped = [is_made for _, is_made in updates].index(True)
    assert skipped > 0
    # Whole windows were held back: the first update that is made is at most one batch ahead of the schedule's begin.
    assert updates[skipped][0] == pytest.approx(0.2)


@ranks(1, 2)
def test_a_session_steps_a_schedule_only_after_updates(tmp_path):
    session = Session(tmp_path, amp="float16", randomness={"seed": 0}, log_level="ERROR")
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda count: 0.5**count)
    loader = DataLoader(TensorDataset(X), batch_size=2 // get_world_size())
    model, optim, batches = session.prepare(model, optimizer, loader, schedulers=[schedule])
    weights = [model.linear.weight.detach().clone()]
    for _ in session.epochs(1):
        for (x,) in batches:
            session.step(model(x))
            changed = not torch.equal(model.linear.weight, weights[-1])
            assert session.is_update == changed
            weights.append(model.linear.weight.detach().clone())
            if session.is_update:
                schedule.step()
    assert 0 < schedule.last_epoch < 16
    assert optim.skipped_updates == 16 - schedule.last_epoch


class Asked(AmpOptimWrapper):
    """Counts how often it is asked for its skipped updates, for which an accelerator is waited for."""

    asked = 0

    @property
    def skipped_updates(self) -> int:
        self.asked += 1
        return super().skipped_updates


def test_nobody_waits_for_updates_whose_count_no_schedule_needs(tmp_path):
    def train(schedule: dict[str, Any]) -> int:
        model = Net()
        optim = Asked(dtype="float16", optimizer=torch.optim.AdamW(model.parameters(), fused=True))
        Runner(
            model,
            tmp_path,
            train_dataloader={"dataset": TensorDataset(X), "batch_size": 2},
            train_cfg={"max_epochs": 1},
            optim_wrapper=optim,
            param_scheduler=schedule,
            visualizer=[],
            log_level="ERROR",
        ).train()
        return optim.asked

    assert train({"type": "StepLR", "step_size": 1}) == 1  # before the training
    assert train({"type": "LinearLR", "by_epoch": False}) == 17


class Later:
    """The event of a device that reaches it when it is waited for, or after some looks."""

    def __init__(self, looks: int) -> None:
        self.looks, self.waited = looks, False

    def query(self) -> bool:
        self.looks -= 1
        return self.looks < 0

    def synchronize(self) -> None:
        self.waited = self.looks >= 0


def test_updates_that_nobody_asks_for_are_forgotten_without_waiting():
    weight = nn.Parameter(torch.ones(2))
    optim = AmpOptimWrapper(dtype="float16", optimizer=torch.optim.AdamW([weight], fused=True))
    scaler: Any = optim._scaler
    event = Later(looks=2)
    scaler._unknown.append((torch.tensor(1.0), event))
    for expected in (2, 3, 1):  # behind an update that is not known yet, later ones wait
        optim.update_params(weight.sum())
        assert len(scaler._unknown) == expected
    assert not event.waited
    assert optim.skipped_updates == 1
