"""A model of which each batch of a window reaches another part, by an engine's update."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lockstep.dist import get_rank
from lockstep.strategy import Strategy


class InTurns(nn.Module):
    """Each batch reaches one of its parts."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 1), nn.Linear(2, 1)

    def forward(self, x: Tensor, part: str) -> Tensor:
        return getattr(self, part)(x).sum()


def check_both_parts_are_trained(strategy: Strategy) -> None:
    """Check on each of two ranks the update of a window of two batches."""
    net = InTurns()
    model, wrapper = strategy.prepare(net, {"optimizer": {"type": "SGD", "lr": 1.0}, "accumulative_counts": 2})
    before = [parameter.detach().clone() for parameter in net.parameters()]
    for part in ("first", "second"):
        with wrapper.optim_context(model):
            loss = model(torch.full((3, 2), 1.0 + get_rank()), part)
        wrapper.update_params(loss)
    changes = [(one - own.detach()).flatten().tolist() for one, own in zip(before, net.parameters(), strict=True)]
    mean = 3 * (1 + 2) / 2 / 2  # over ranks, and over the batches of the window
    assert changes == [pytest.approx([mean, mean], abs=1e-5), pytest.approx([1.5], abs=1e-5)] * 2
