"""Errors that come up where a backend's are translated."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as torch_dist
from torch import nn

from lockstep.dist import all_reduce, get_rank, init_dist
from lockstep.errors import CollectiveTimeoutError
from lockstep.model import MMFullyShardedDataParallel, MMSeparateDistributedDataParallel
from lockstep.optim import OptimWrapper
from lockstep.testing import ranks
from lockstep.watch.failures import backend_errors_translated


@ranks(2)
@pytest.mark.parametrize("text", ["request timed out", "CUDA error: the launch timed out and was terminated"])
def test_a_timeout_of_something_else_than_a_backend_breaks_no_group(text: str) -> None:
    with pytest.raises(RuntimeError, match=f"^{text}$"), backend_errors_translated():
        raise RuntimeError(text)
    all_reduce(data := torch.ones(1))
    assert data.item() == 2.0


@ranks(3, fresh=True)
def test_an_error_in_a_group_names_that_groups_absent_rank(tmp_path: Path) -> None:
    init_dist("pytorch", timeout=60)
    group = torch_dist.new_group([1, 2], timeout=timedelta(seconds=2))
    if get_rank() == 1:
        with (
            pytest.raises(CollectiveTimeoutError, match=r"^rank 1 of the group of ranks 1, 2 did not take part"),
            backend_errors_translated(group),
        ):
            torch_dist.all_reduce(torch.ones(1), group=group)
        (tmp_path / "raised").touch()
    while not (tmp_path / "raised").exists():
        time.sleep(0.1)


@ranks(3, fresh=True)
@pytest.mark.parametrize("kind", [MMFullyShardedDataParallel, MMSeparateDistributedDataParallel])
def test_an_error_of_a_wrapper_names_the_absent_rank_of_its_group(tmp_path: Path, kind: type) -> None:
    init_dist("pytorch", timeout=60)
    group = torch_dist.new_group([1, 2], timeout=timedelta(seconds=4))
    if get_rank() > 0:
        net = nn.Sequential(nn.Linear(2, 1))
        model = kind(net, process_group=group)
        optim_wrapper = OptimWrapper(torch.optim.SGD(model.parameters(), lr=0.1))
        for _ in range(12):  # in the first ones, ranks compare what they do
            model.train_step({"input": torch.ones(1, 2)}, optim_wrapper)
        if get_rank() == 1:
            with pytest.raises(CollectiveTimeoutError, match=r"^rank 1 of the group of ranks 1, 2 did not take part"):
                model.train_step({"input": torch.ones(1, 2)}, optim_wrapper)
            (tmp_path / "raised").touch()
    while not (tmp_path / "raised").exists():
        time.sleep(0.1)
