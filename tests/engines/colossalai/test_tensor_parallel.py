"""Models that tensor parallelism by ColossalAI would compute otherwise are refused in the first step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lockstep.errors import ConfigError
from lockstep.testing import ranks

from ...strategy.test_tensor_parallel_trial import PLAN, WIDTH, FixedHeads, Fused, Model, NormedHeads
from .training import strategy_of


class Penalized(nn.Module):
    """Adds to its loss the squares of a weight, which it looks up in the layer that has it."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu()).square().mean() + self.up.weight.square().sum()


def _first_step(model: nn.Module, plan: dict[str, str]) -> None:
    config = {"optimizer": {"type": "SGD", "lr": 0.1}}
    strategy = strategy_of("hybrid", tensor_parallel={"degree": 2, "plan": plan})
    laid, optimizer = strategy.prepare(model, config)
    optimizer.update_params(laid(torch.randn(2, 5, WIDTH)))


@pytest.mark.parametrize(
    ("block", "message"),
    [
        (FixedHeads, r"split `blocks\.0` so that it returns.* FixedHeads may divide"),
        (Fused, r"split `blocks\.0` so that it returns.* Fused may divide"),
        (NormedHeads, r"`blocks\.0\.norm\.weight` must get the gradient.*Use strategy 'fsdp'"),
    ],
)
@ranks(2)
def test_a_module_that_computes_something_else_is_refused(block: Any, message: str):
    with pytest.raises(ConfigError, match=message):
        _first_step(Model(block), PLAN)


@ranks(2)
def test_a_split_weight_that_is_used_outside_of_its_layer_is_refused():
    with pytest.raises(
        ConfigError, match=r"must leave 'up.weight' to the layer that holds it, but used it in `square`"
    ):
        _first_step(Penalized(), {"up": "colwise", "down": "rowwise"})
