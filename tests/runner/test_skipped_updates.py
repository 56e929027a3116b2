"""A session tells where float16 has skipped an update."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lockstep import Session
from lockstep.dist import get_world_size
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


@ranks(1, 2)
def test_a_session_steps_a_schedule_only_after_updates(tmp_path):
    session = Session(tmp_path, amp="float16", randomness={"seed": 0}, log_level="ERROR")
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda count: 0.5**count)
    loader = DataLoader(TensorDataset(X), batch_size=2 // get_world_size())
    model, _, batches = session.prepare(model, optimizer, loader, schedulers=[schedule])
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
