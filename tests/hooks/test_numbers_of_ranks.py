"""What ranks tell each other beside the training arrives whole, whoever has which names."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from torch import Tensor, nn

from lockstep.dist import get_rank, get_world_size
from lockstep.hooks import LoggerHook
from lockstep.hooks.numbers_of_ranks import NumbersOfRanks
from lockstep.testing import ranks

from .runs import make_runner


@ranks(1, 2, 3)
def test_numbers_come_in_the_order_of_ranks_also_when_names_come_and_go():
    world_size = get_world_size()
    numbers = NumbersOfRanks()
    rounds = [
        lambda rank: {"time": 1.5 + rank, "loss": math.inf},
        lambda rank: {"time": 2.5 + rank, "loss": -0.0},
        lambda rank: {"time": 0.1} if rank else {"loss": 1e-300},  # each lacks one
        lambda rank: {"time": 0.2, "late": 7.0} if rank == world_size - 1 else {"time": 0.2},  # one has a new one
        lambda rank: {"late": float(rank), "time": 0.3},
        lambda rank: {},
    ]
    for sent in rounds:
        numbers.send(sent(get_rank()))
        received = numbers.receive()
        assert received == ([sent(rank) for rank in range(world_size)] if get_rank() == 0 else None)


@ranks(2)
def test_a_value_that_is_no_number_stays_in_its_place():
    numbers = NumbersOfRanks()
    for _ in range(2):  # the first time dicts travel as they are, then numbers alone
        numbers.send({"loss": math.nan if get_rank() else 3.0, "time": 1.0})
        received = numbers.receive()
    if get_rank() == 0:
        assert received[0] == {"loss": 3.0, "time": 1.0}
        assert math.isnan(received[1]["loss"])
        assert received[1]["time"] == 1.0


class Failing(nn.Module):
    """Fails on every rank in the iteration after the second record."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.calls = 0

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 5:
            raise RuntimeError("out of luck")
        return (self.layer(x) - y).square().mean()


@ranks(1, 2)
def test_a_run_that_fails_keeps_the_record_that_was_under_way(tmp_path: Path):
    runner = make_runner(tmp_path, [LoggerHook(interval=2)], kind=Failing, default_hooks={"logger": None})
    with pytest.raises(RuntimeError, match="out of luck"):
        runner.train()
    if get_rank() == 0:
        lines = (runner.run_dir / "metrics.jsonl").read_text().splitlines()
        records = [json.loads(line) for line in lines]
        assert [record["iter"] for record in records if record["mode"] == "train"] == [2, 4]
