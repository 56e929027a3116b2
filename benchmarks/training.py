"""What the Runner costs per training step, against a loop written by hand over torch's DDP."""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import redirect_stdout
from functools import partial
from io import StringIO
from random import Random
from statistics import median

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from benchmarks.measure import Row, limited, slowest
from lockstep import Runner, Session, dist
from lockstep.hooks import Hook
from lockstep.runner import TrainRun

STEPS = 150
# Width and batch of a perceptron whose step takes about that long on two ranks of one core each; rounds, of which a
# short step, whose single runs spread by a tenth, needs more; the goal.
_CASES = {"a step of about 3 ms": (384, 32, 40, "<= 1.05"), "a step of about 10 ms": (768, 64, 14, "<= 1.02")}


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


class Stopwatch:
    """Times a loop from the end of its first iteration to the end of its last: start-up is not counted."""

    def __init__(self) -> None:
        self.laps = 0

    def lap(self) -> None:
        """Note the end of an iteration."""
        self.end = time.perf_counter()
        if self.laps == 0:
            self.start = self.end
        self.laps += 1

    def seconds(self) -> float:
        """Return the seconds of an iteration."""
        return (self.end - self.start) / (self.laps - 1)


class StopwatchHook(Hook):
    """Times the loop of a Runner."""

    # After the hooks that work at each step, before the one that saves at the end of training.
    priority = 80

    def __init__(self, watch: Stopwatch) -> None:
        self.watch = watch

    def after_train_iter(
        self, runner: TrainRun, batch_idx: int, data_batch: object = None, outputs: object = None
    ) -> None:
        self.watch.lap()


Training = Callable[[Samples, int, int], float]


def rows() -> Iterator[Row]:
    """Compare the Runner with the loop by hand, and with one that is tuned in the way of the Runner."""
    yield from compare_trainings({"Runner": with_runner, "Session": with_session, **TUNED})


def compare_trainings(contenders: Mapping[str, Training]) -> Iterator[Row]:
    """Time trainings against the loop by hand, all in turn. **Collective**."""
    world_size = dist.get_world_size()
    names = ["by hand", *contenders]
    trainings = [by_hand, *contenders.values()]
    for case, (width, batch, rounds, goal) in _CASES.items():
        torch.manual_seed(0)
        data = Samples(STEPS * batch * world_size, width)
        seconds: dict[str, list[float]] = {name: [] for name in names}
        for number in range(limited(rounds) + 1):
            # The same on every rank, and each time another, because what one training leaves behind may cost the next.
            for which in Random(number).sample(range(len(names)), len(names)):
                gc.collect()
                spent = trainings[which](data, width, batch)
                if number:  # the first round warms up
                    seconds[names[which]].append(spent)
        times = {name: slowest(one) for name, one in seconds.items()}
        for name in contenders:
            yield Row(
                f"training, {world_size} rank{'s' if world_size > 1 else ''}, {case}",
                name,
                "PyTorch by hand" if world_size == 1 else "torch DDP by hand",
                min(times[name]),
                median(times[name]),
                min(times["by hand"]),
                median(times["by hand"]),
                goal if name == "Runner" else "",
            )


def loader_of(data: Samples, batch: int) -> DataLoader[tuple[Tensor, Tensor]]:
    sampler = torch.utils.data.DistributedSampler(data, shuffle=True, seed=0)
    return DataLoader(data, batch_size=batch, sampler=sampler)


def with_runner(data: Samples, width: int, batch: int) -> float:
    watch = Stopwatch()
    # What it prints is part of its work, but would drown the table.
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(StringIO()):
        Runner(
            model=Classifier(width),
            work_dir=folder,
            train_dataloader=loader_of(data, batch),
            optim_wrapper=dict(optimizer=dict(type="AdamW", lr=1e-3)),
            train_cfg=dict(by_epoch=False, max_iters=STEPS),
            custom_hooks=[StopwatchHook(watch)],
        ).train()
    return watch.seconds()


def with_session(data: Samples, width: int, batch: int) -> float:
    watch = Stopwatch()
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(StringIO()):
        session = Session(folder)
        model: nn.Module = Classifier(width)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        model, _, loader = session.prepare(model, optimizer, loader_of(data, batch))
        for _ in session.epochs(1):
            for inputs, targets in loader:
                session.step(model(inputs, targets))
                watch.lap()
    return watch.seconds()


def by_hand(data: Samples, width: int, batch: int, **options: bool) -> float:
    model: nn.Module = Classifier(width)
    if dist.get_world_size() > 1:
        model = nn.parallel.DistributedDataParallel(model, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = loader_of(data, batch)
    model.train()
    watch = Stopwatch()
    for inputs, targets in loader:
        loss = model(inputs, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        watch.lap()
    return watch.seconds()


# The one option of torch's DDP that the Runner sets by itself, see docs/decisions/0010.
TUNED: dict[str, Training] = {"by hand, gradient_as_bucket_view": partial(by_hand, gradient_as_bucket_view=True)}
