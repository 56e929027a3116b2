"""One set of running statistics for all ranks, when it is validated, tested and saved."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

from lockstep.checkpoint import find_last_checkpoint, load_state
from lockstep.dist import all_gather_object, get_rank
from lockstep.hooks import Hook
from lockstep.hooks.buffers import _wider, average_buffers
from lockstep.model import unwrap_model
from lockstep.testing import ranks

from .runs import Net, Predicted, make_data, make_runner


class Statistics(Hook):
    """Keeps what every rank's running mean is at the end of each epoch, before anything is made of it."""

    priority = "HIGHEST"

    def __init__(self) -> None:
        self.by_rank: list[list[torch.Tensor]] = []

    def after_train_epoch(self, runner) -> None:
        self.by_rank.append(all_gather_object(unwrap_model(runner.model).norm.running_mean))


@ranks(2)
def test_validation_test_and_checkpoint_have_the_mean_over_ranks(tmp_path: Path):
    statistics, val, test = Statistics(), Predicted(), Predicted()
    runner = make_runner(tmp_path, [statistics], val, test_dataloader=make_data(), test_evaluator=test)
    runner.train()
    means = [torch.stack(by_rank).mean(0) for by_rank in statistics.by_rank]
    assert not torch.equal(*statistics.by_rank[0])
    for (_, seen), mean in zip(val.seen, means, strict=True):
        assert torch.allclose(seen, mean)
    saved = load_state(find_last_checkpoint(tmp_path), {"model": Net().state_dict()})["model"]
    assert torch.allclose(saved["norm.running_mean"], means[-1])
    unwrap_model(runner.model).norm.running_mean.fill_(get_rank())
    runner.test()
    assert test.seen[0][1].tolist() == [0.5] * 3


@ranks(1, 2, 3)
def test_means_of_numbers_and_the_first_ranks_counts():
    rank, size = get_rank(), len(all_gather_object(None))
    floats = [torch.full((2, 2), float(rank)), torch.tensor(rank * 2.0, dtype=torch.float64)]
    whole = [torch.tensor(rank + 5), torch.tensor([rank, 1]), torch.tensor([rank == 0]), torch.empty(0).long()]
    wide = torch.zeros(2, 4)[:, ::2].fill_(rank)  # not contiguous
    average_buffers([*floats, *whole, wide])
    middle = (size - 1) / 2
    assert floats[0].tolist() == [[pytest.approx(middle)] * 2] * 2
    assert floats[1].item() == pytest.approx(2 * middle)
    assert [x.tolist() for x in whole] == [5, [0, 1], [True], []]
    assert wide.eq(middle).all()
    average_buffers([])


@ranks(2)
def test_buffers_that_torch_does_not_write_to_as_they_are():
    rank = get_rank()
    expanded, count = torch.tensor([1.0 + rank]).expand(4), torch.tensor([5 + rank]).expand(2, 3)
    sparse = torch.tensor([0.0, 2.0 + rank, 3.0]).to_sparse()
    average_buffers([expanded, count, sparse])
    assert (expanded.tolist(), count.tolist()) == ([1.5] * 4, [[5] * 3] * 2)
    assert sparse.to_dense().tolist() == [0.0, 2.0, 3.0]


@pytest.mark.parametrize(("device", "dtype"), [("cpu", torch.complex128), ("mps", torch.complex64)])
def test_complex_buffers_are_as_wide_as_their_device_can(device: str, dtype: torch.dtype):
    with patch("torch.Tensor.device", torch.device(device)):
        assert _wider(torch.zeros(1, dtype=torch.complex64)) == dtype


@ranks(3)
def test_buffers_that_are_equal_on_all_ranks_stay_as_they_are():
    torch.manual_seed(0)
    buffers = [torch.randn(1000), torch.randn(100).bfloat16(), torch.full((3,), torch.finfo(torch.float32).min)]
    buffers += [torch.tensor([-torch.inf, 1.0]), torch.randn(10, dtype=torch.complex64)]
    before = [buffer.clone() for buffer in buffers]
    average_buffers(buffers)
    assert all(map(torch.equal, buffers, before))


@ranks(2)
def test_means_of_buffers_that_tensor_parallelism_has_replicated():
    mesh = init_device_mesh("cpu", (2,))
    scale = DTensor.from_local(torch.tensor([1.0 + get_rank()]), mesh, [Replicate()], run_check=False)
    count = DTensor.from_local(torch.tensor(5 + get_rank()), mesh, [Replicate()], run_check=False)
    average_buffers([scale, count])
    assert (scale.to_local().item(), count.to_local().item()) == (1.5, 5)


def log_of(work_dir: Path) -> str:
    return next(work_dir.glob("*/log.txt")).read_text()


class Positions(Net):
    """Has a table of positions, of which it extends the table when a sample of this rank needs more of them."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(0), persistent=False)

    def forward(self, x, y, mode: str = "tensor"):
        if get_rank() + 2 > len(self.table):
            self.table = torch.arange(get_rank() + 2.0)
        return super().forward(x + self.table[1], y, mode)


@ranks(2)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_buffer_of_other_shapes_stays_as_it_is(strategy: str, tmp_path: Path):
    ema = {"type": "EMAHook", "momentum": 0.5, "update_buffers": True}
    runner = make_runner(tmp_path, [ema], Predicted(), Positions, strategy=strategy)
    runner.train()
    assert unwrap_model(runner.model).table.tolist() == list(range(get_rank() + 2))
    assert "these buffers" not in log_of(tmp_path)


class Codebook(Net):
    """Follows the mean of its inputs, of this rank's alone or of all ranks'."""

    def __init__(self, together: bool) -> None:
        super().__init__()
        self.together = together
        self.register_buffer("code", torch.zeros(3))

    def forward(self, x, y, mode: str = "tensor"):
        if self.training:
            self.code.lerp_(torch.stack(all_gather_object(x.mean(0))).mean(0) if self.together else x.mean(0), 0.5)
        return super().forward(x, y, mode)


@ranks(2)
@pytest.mark.parametrize("together", [True, False])
def test_buffers_that_each_rank_updates_by_itself_are_warned_of(together: bool, tmp_path: Path):
    runner = make_runner(tmp_path, [], None, partial(Codebook, together))
    runner.train()
    assert log_of(tmp_path).count("with its own samples: code. They") == (not together)
