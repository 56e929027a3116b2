"""Weights that are used outside of the unit that gathers them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from lockstep.model import MMFullyShardedDataParallel
from lockstep.testing import ranks


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


class Net(nn.Module):
    """Uses its second block as it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(6, 1)

    def forward(self, x: Tensor, how: str) -> Tensor:
        x = self.blocks[0](x)
        if how == "weight":
            x = linear(x, self.blocks[1].inner.weight)
        if how == "part":
            x = self.blocks[1].inner(x)
        if how == "after":
            x = linear(self.blocks[2](self.blocks[1](x)), self.blocks[1].inner.weight)
        return self.head(x).mean()

    def val_step(self, data: Tensor) -> Tensor:
        return self(data, "part")


@ranks(2)
@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("weight", r"but FSDPNet uses .* those of `blocks.1`, `blocks.2`\. Call that module as a whole, or leave it"),
        ("part", r"but Linear uses .* those of `blocks.1`\. "),
        ("after", r"but FSDPNet uses .* those of `blocks.0`, `blocks.1`, `blocks.2`\. "),
    ],
)
def test_units_whose_weights_are_used_outside_are_named(how: str, says: str):
    model = MMFullyShardedDataParallel(Net(), auto_wrap_policy="Block")
    with pytest.raises(RuntimeError, match=says):
        model(torch.ones(2, 6), how)


@ranks(2)
def test_a_prediction_is_told_too_and_without_units_all_is_well():
    model = MMFullyShardedDataParallel(Net(), auto_wrap_policy="Block")
    with pytest.raises(RuntimeError, match=r"those of `blocks.1`\. "), torch.no_grad():
        model.val_step(torch.ones(2, 6))
    whole = MMFullyShardedDataParallel(Net())
    for how in ("weight", "part", "after"):
        whole(torch.ones(2, 6), how).backward()
