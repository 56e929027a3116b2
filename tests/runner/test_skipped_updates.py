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
