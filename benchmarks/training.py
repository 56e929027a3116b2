"""What the Runner costs per training step, against a loop written by hand over torch's DDP."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from statistics import median

import torch
import torch.distributed as torch_dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from benchmarks.measure import Row, slowest
from lockstep import Runner, dist
from lockstep.hooks import Hook

_STEPS = 150
_ROUNDS = 12
# Width and batch of a perceptron whose step takes about that long on two ranks of one core each.
_CASES = {"a step of about 3 ms": (384, 32, "<= 1.05"), "a step of about 10 ms": (768, 64, "<= 1.02")}


class Samples(Dataset[tuple[Tensor, Tensor]]):
    """As many samples as one training takes, made before it starts."""

    def __init__(self, size: int, width: int) -> None:
        self.inputs, self.targets = torch.randn(size, width), torch.randint(0, 10, (size,))

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index], self.targets[index]


class Classifier(nn.Module):
    """A perceptron that returns its loss."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)
        )

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.layers(inputs), targets)


class Stopwatch(Hook):
    """Times the loop alone, without what comes before and after."""

    priority = "LOWEST"

    def before_train(self, runner: Runner) -> None:
        torch_dist.barrier()
        self.start = time.perf_counter()

    def after_train_iter(
        self, runner: Runner, batch_idx: int, data_batch: object = None, outputs: object = None
    ) -> None:
        self.end = time.perf_counter()


def rows() -> Iterator[Row]:
    for case, (width, batch, goal) in _CASES.items():
        torch.manual_seed(0)
        data = Samples(_STEPS * batch * dist.get_world_size(), width)
        seconds: list[list[float]] = [[], []]
        for number in range(_ROUNDS + 1):
            for which in (0, 1) if number % 2 else (1, 0):
                spent = (_with_runner, _by_hand)[which](data, width, batch)
                if number:  # the first round warms up
                    seconds[which].append(spent / _STEPS)
        ours, theirs = (slowest(times) for times in seconds)
        yield Row(
            "training, two ranks",
            case,
            "torch DDP by hand",
            min(ours),
            median(ours),
            min(theirs),
            median(theirs),
            goal,
        )


def _loader(data: Samples, batch: int) -> DataLoader[tuple[Tensor, Tensor]]:
    sampler = torch.utils.data.DistributedSampler(data, shuffle=True, seed=0)
    return DataLoader(data, batch_size=batch, sampler=sampler)


def _with_runner(data: Samples, width: int, batch: int) -> float:
    watch = Stopwatch()
    with tempfile.TemporaryDirectory() as folder:
        Runner(
            model=Classifier(width),
            work_dir=folder,
            train_dataloader=_loader(data, batch),
            optim_wrapper=dict(optimizer=dict(type="AdamW", lr=1e-3)),
            train_cfg=dict(by_epoch=False, max_iters=_STEPS),
            custom_hooks=[watch],
        ).train()
    return watch.end - watch.start


def _by_hand(data: Samples, width: int, batch: int) -> float:
    model = nn.parallel.DistributedDataParallel(Classifier(width))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = _loader(data, batch)
    model.train()
    torch_dist.barrier()
    start = time.perf_counter()
    for inputs, targets in loader:
        loss = model(inputs, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return time.perf_counter() - start
