"""A record that is under way when a run fails is not lost."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from torch import Tensor, nn

from lockstep.dist import get_rank
from lockstep.hooks import LoggerHook
from lockstep.testing import ranks

from .runs import make_runner


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
