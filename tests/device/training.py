"""A short training, on whatever device there is."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lockstep import Runner
from lockstep.hooks import Hook
from lockstep.model import ExponentialMovingAverage
from lockstep.model.full_params import gather_full
from lockstep.model.tensor_parallel_trial import _differences, _Run

STRATEGIES = ("ddp", "fsdp")
EPOCH = 4  # steps


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1))

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {"loss": (self.layers(x) - y).square().mean()}


class Losses(Hook):
    """Remembers the loss of each step, and how often the host had read the device by then."""

    priority = "LOWEST"

    def __init__(self, host_reads: Callable[[], int]) -> None:
        self.host_reads = host_reads
        self.seen: list[Tensor] = []
        self.reads: list[int] = []

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None) -> None:
        self.seen.append(outputs["loss"].detach().clone())
        self.reads.append(self.host_reads())


def losses(
    work_dir: Path, strategy: str, host_reads: Callable[[], int] = int
) -> tuple[str, list[float], list[float], list[int]]:
    """Return the kind of device, this rank's losses, the weights at the end, and how often each step reads the device.

    The first step of an epoch is left out.
    """
    torch.manual_seed(0)
    seen = Losses(host_reads)
    runner = Runner(
        Net(),
        work_dir,
        train_dataloader={
            "dataset": TensorDataset(torch.arange(16.0 * EPOCH).view(-1, 2) / 64, torch.ones(8 * EPOCH, 1)),
            "batch_size": 4,
            "shuffle": False,
        },
        train_cfg={"max_epochs": 2},
        optim_wrapper={"optimizer": {"type": "AdamW", "lr": 0.05}, "clip_grad": {"max_norm": 1.0}},
        strategy=strategy,
        custom_hooks=[seen],
    )
    model = runner.train()
    whole = [gather_full(parameter.detach()).cpu() for parameter in model.parameters()]
    weights = [value for one in whole for value in one.flatten().tolist()]
    reads = [after - before for before, after in pairwise(seen.reads)]
    del reads[EPOCH - 1 :: EPOCH]
    return seen.seen[0].device.type, [x.item() for x in seen.seen], weights, reads


def averaged(device: str) -> list[float]:
    """Return an average that is kept on the CPU, of a layer on a device whose weights grow."""
    layer = nn.Linear(2, 1).to(device)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.fill_(1.0)
    average = ExponentialMovingAverage(layer, momentum=0.5, device="cpu")
    for _ in range(3):
        average.update_parameters(layer)
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.add_(1.0)
    return [value for one in average.module.parameters() for value in one.detach().flatten().tolist()]


def trial(device: str) -> list[float]:
    """Return how far a copy of a layer is from the layer, in the way in which plans are tried."""
    torch.manual_seed(0)
    layer = nn.Linear(2, 3)
    inputs = (torch.ones(4, 2, device=device),), {}
    runs = [_Run(copy.deepcopy(layer).to(device), inputs) for _ in range(2)]
    return _differences(*runs).tolist()
