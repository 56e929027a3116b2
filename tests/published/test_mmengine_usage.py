"""The distributed uses that MMEngine's documentation shows, as its users write them, on two real ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - as everybody calls it
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import DataLoader, TensorDataset

import lockstep.dist as dist
from lockstep.dataset import DefaultSampler
from lockstep.evaluator import BaseMetric
from lockstep.model import BaseModel, MMDistributedDataParallel
from lockstep.optim import OptimWrapper
from lockstep.runner import Runner
from lockstep.testing import ranks

IMAGES = torch.rand(26, 3, 8, 8, generator=torch.Generator().manual_seed(0))
LABELS = (IMAGES.mean(dim=(1, 2, 3)) > 0.5).long()


class MMNet(BaseModel):
    """Wraps a network of the user's, in the way of the documentation's first page."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 2))

    def forward(self, imgs: Tensor, labels: Tensor, mode: str):
        x = self.net(imgs)
        if mode == "loss":
            return {"loss": F.cross_entropy(x, labels)}
        if mode == "predict":
            return x, labels
        return x


class BatchAccuracy(BaseMetric):
    """The documentation's own metric: one result per batch."""

    def process(self, data_batch: Any, data_samples: Any) -> None:
        score, gt = data_samples
        self.results.append({"batch_size": len(gt), "correct": (score.argmax(dim=1) == gt).sum().cpu()})

    def compute_metrics(self, results: list[Any]) -> dict[str, Any]:
        total_correct = sum(item["correct"] for item in results)
        total_size = sum(item["batch_size"] for item in results)
        return {"accuracy": 100 * total_correct / total_size}


def train_loader() -> DataLoader:
    return DataLoader(TensorDataset(IMAGES, LABELS), batch_size=4, shuffle=True)


def val_loader() -> DataLoader:
    return DataLoader(TensorDataset(IMAGES[:13], LABELS[:13]), batch_size=4, shuffle=False)


@ranks(2, fresh=True)
def test_the_runner_joins_wraps_and_trains(tmp_path: Path):
    runner = Runner(
        model=MMNet(),
        work_dir=str(tmp_path),
        train_dataloader=train_loader(),
        launcher="pytorch",
    )
    runner.train()
    assert dist.get_world_size() == 2
    assert isinstance(runner.model, MMDistributedDataParallel)
    weights = dist.all_gather(runner.model.module.net[0].weight.detach())
    assert torch.equal(*weights)


@ranks(2, fresh=True)
def test_the_first_page_of_the_documentation_trains_on_two_ranks(tmp_path: Path):
    runner = Runner(
        model=MMNet(),
        work_dir=str(tmp_path),
        train_dataloader=train_loader(),
        optim_wrapper={"optimizer": {"type": SGD, "lr": 0.001, "momentum": 0.9}},
        train_cfg={"by_epoch": True, "max_epochs": 5, "val_interval": 1},
        val_dataloader=val_loader(),
        val_cfg={},
        val_evaluator={"type": BatchAccuracy},
        launcher="pytorch",
    )
    runner.train()
    assert runner.epoch == 5
    model = runner.model.module.eval()
    right = (model(IMAGES[:13], None, "tensor").argmax(1) == LABELS[:13]).sum()
    assert float(runner.val_loop.metrics["accuracy"]) == pytest.approx(100 * float(right) / 13)


@ranks(2, fresh=True)
def test_initialising_and_wrapping_by_hand():
    dist.init_dist("pytorch", backend="gloo")
    rank, world_size = dist.get_dist_info()
    assert (rank, world_size) == (dist.get_rank(), 2)
    model = MMDistributedDataParallel(
        module=MMNet(), device_ids=[0], broadcast_buffers=False, find_unused_parameters=False
    )
    optim_wrapper = OptimWrapper(optimizer=SGD(model.parameters(), lr=0.1))
    before = model.module.net[0].weight.detach().clone()
    log_vars = model.train_step((IMAGES[rank::2], LABELS[rank::2]), optim_wrapper=optim_wrapper)
    assert log_vars["loss"] > 0
    assert not torch.equal(model.module.net[0].weight, before)
    assert torch.equal(*dist.all_gather(model.module.net[0].weight.detach()))


@ranks(2)
def test_all_reduce_with_mean():
    data = torch.arange(2, dtype=torch.int64) + 1 + 2 * dist.get_rank()
    assert data.tolist() == ([1, 2] if dist.get_rank() == 0 else [3, 4])
    dist.all_reduce(data, op="mean")
    assert data.tolist() == [2, 3]
    data = torch.arange(2, dtype=torch.float32) + dist.get_rank()
    dist.all_reduce(data, op="mean")
    assert data.tolist() == [0.5, 1.5]


@ranks(2)
def test_all_gather_into_a_list():
    data = torch.arange(2, dtype=torch.int64) + 1 + 2 * dist.get_rank()
    output = dist.all_gather(data)
    assert [item.tolist() for item in output] == [[1, 2], [3, 4]]
    filled = [torch.zeros(2, dtype=torch.int64) for _ in range(2)]
    dist.all_gather(filled, data)
    assert [item.tolist() for item in filled] == [[1, 2], [3, 4]]


@ranks(2)
def test_broadcast_from_rank_0():
    data = torch.arange(2, dtype=torch.int64) + 1 + 2 * dist.get_rank()
    dist.broadcast(data, src=0)
    assert data.tolist() == [1, 2]


@ranks(2)
def test_all_reduce_dict_with_mean():
    rank = dist.get_rank()
    data = {"key1": torch.arange(2, dtype=torch.int64) + 2 * rank, "key2": torch.tensor(3.0 + rank)}
    output = dist.all_reduce_dict(data, op="mean")
    assert output["key1"].tolist() == [1, 2]
    assert output["key2"].item() == 3.5
    assert output is data


@ranks(2)
def test_collect_results_in_an_evaluation():
    size = len(LABELS[:13])
    sampler = DefaultSampler(range(size), shuffle=False)
    results = [{"index": index, "label": int(LABELS[index])} for index in sampler]
    assert len(results) == 7  # one of the two ranks has seen a sample twice
    collected = dist.collect_results(results, size, device="cpu")
    if dist.get_rank() == 0:
        assert [item["index"] for item in collected] == list(range(13))
        assert [item["label"] for item in collected] == LABELS[:13].tolist()
    else:
        assert collected is None


@ranks(2)
def test_master_only(tmp_path: Path):
    @dist.master_only
    def save() -> str:
        path = tmp_path / "written"
        path.write_text(str(dist.get_rank()))
        return path.name

    assert save() == ("written" if dist.is_main_process() else None)
    dist.barrier()
    assert (tmp_path / "written").read_text() == "0"


@ranks(2)
def test_sync_random_seed():
    assert dist.sync_random_seed(42) == 42
    torch.manual_seed(dist.get_rank())
    seeds = dist.all_gather_object(dist.sync_random_seed())
    assert seeds[0] == seeds[1]
    assert isinstance(seeds[0], int)
