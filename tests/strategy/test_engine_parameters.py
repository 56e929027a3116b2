"""Masters in the memory of the host follow what is written into the weights."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lockstep.errors import ConfigError
from lockstep.strategy import DeepSpeedOptimWrapper, engine_parameters
from lockstep.strategy.engine_parameters import MasterWeights

WRITES: dict[str, Callable[[Tensor], object]] = {
    "another value": lambda x: x[0, 1].add_(1),
    "rows change places": lambda x: x.copy_(x.flip(0)),
    "columns change places": lambda x: x.copy_(x.flip(1)),
    "two elements change places": lambda x: x.view(-1).copy_(x.view(-1)[[10, *range(1, 10), 0]]),
    "one is as much larger as the other is smaller": lambda x: (x[0, 0].add_(1), x[0, 1].sub_(1)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("write", WRITES)
def test_masters_of_an_offloaded_optimizer_follow_every_write(
    write: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_parameters, "_BLOCK", 4)  # elements at a time
    weights = torch.arange(1.0, 12.0).to(dtype).view(1, 11)
    if "rows" in write:
        weights = torch.arange(1.0, 13.0).to(dtype).view(4, 3)
    master = weights.float().clone()
    masters = MasterWeights("an engine", [], [(master, weights)], offloads=True)
    WRITES[write](weights)
    masters.copy_weights()
    assert torch.equal(master, weights.float())


def test_masters_keep_their_digits_where_nothing_was_written() -> None:
    master = torch.tensor([1.001, 2.002, 3.003])
    weights, before = master.bfloat16(), master.clone()
    masters = MasterWeights("an engine", [], [(master, weights)], offloads=True)
    masters.copy_weights()
    assert torch.equal(master, before)


def test_an_engine_keeps_the_number_of_batches_that_it_was_made_for() -> None:
    wrapper = DeepSpeedOptimWrapper(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))]), 2)
    with pytest.raises(ConfigError, match=r"`accumulative_counts` must stay 2 under DeepSpeed.* but was set to 4"):
        wrapper.accumulative_counts = 4
    assert wrapper.accumulative_counts == 2
