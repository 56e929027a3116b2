"""A rank that trains on the simulated accelerator in many ways, and counts how often its host waits for the device.

Usage: loop.py FOLDER; it writes what it has found, as JSON. `test_loop.py` says what is right.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))

from sim import simulator
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import IterableDataset, TensorDataset

from lockstep import Runner, Session, dist
from lockstep.hooks import Hook

DEVICE = "sim"
STEPS = 24
RECORD = 8  # iterations from one record to the next
SIZE = 4  # samples of a batch


class Copies(TorchDispatchMode):
    """Counts copies to the device for which the host waits."""

    def __init__(self) -> None:
        super().__init__()
        self.blocking = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._to_copy.default:
            goes = torch.device(kwargs.get("device") or args[0].device).type == DEVICE != args[0].device.type
            self.blocking += goes and not kwargs.get("non_blocking")
        if func is torch.ops.aten.copy_.default:
            is_free = kwargs.get("non_blocking") or (len(args) > 2 and args[2])
            self.blocking += args[0].device.type == DEVICE != args[1].device.type and not is_free
        return func(*args, **kwargs)


class Waits(Hook):
    """Notes after each step how often the host has waited so far, to read a value or for a copy."""

    priority = "LOWEST"

    def __init__(self, host_reads: Callable[[], int]) -> None:
        self.host_reads = host_reads
        self.copies = Copies()
        self.seen: list[int] = []

    def before_train_epoch(self, runner: Any) -> None:
        self.copies.__enter__()

    def after_train_epoch(self, runner: Any) -> None:
        self.copies.__exit__(None, None, None)

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        self.seen.append(self.host_reads() + self.copies.blocking)

    def by_step(self) -> list[int]:
        """Return the number of waits in each step but the first."""
        return [after - before for before, after in pairwise(self.seen)]


class Net(nn.Module):
    def __init__(self, *others: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 4), *others, nn.Tanh(), nn.Linear(4, 1))

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {"loss": (self.layers(x) - y).square().mean()}


class Scaled(Net):
    """With a parameter of dimension 0, which FSDP does not shard, and one that no loss reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {"loss": (self.scale * self.layers(x) - y).square().mean(), "scale": self.scale}


DATA = TensorDataset(torch.arange(4.0 * SIZE * STEPS).view(-1, 2) / 64, torch.ones(2 * SIZE * STEPS, 1))


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield from (DATA[index] for index in range(len(DATA)))


def loader(**changes: Any) -> dict[str, Any]:
    return {"dataset": DATA, "batch_size": SIZE, "shuffle": False, **changes}


ADAMW = {"optimizer": {"type": "AdamW", "lr": 0.01}, "clip_grad": {"max_norm": 1.0}}
# What is unlike a plain training.
CASES: dict[str, dict[str, Any]] = {
    "ddp": {"model": lambda: Net(nn.BatchNorm1d(4))},
    "fsdp": {"strategy": "fsdp"},
    "fsdp with a parameter of dimension 0": {"strategy": "fsdp", "model": Scaled},
    "a stream": {"train_dataloader": loader(dataset=Stream())},
    "batch_size_of": {"train_cfg": {"batch_size_of": lambda batch: batch[0].shape[0]}},
    "workers": {"train_dataloader": loader(num_workers=1)},
    "accumulation": {"optim_wrapper": {**ADAMW, "accumulative_counts": 2}},
    "an average": {"custom_hooks": [{"type": "EMAHook"}]},
    "an average on the CPU": {"custom_hooks": [{"type": "EMAHook", "device": "cpu"}]},
}


def runner(folder: Path, case: dict[str, Any], waits: Waits) -> Runner:
    hooks = [waits, *case.get("custom_hooks", ())]
    options: dict[str, Any] = {
        "strategy": "ddp",
        "train_dataloader": loader(),
        "optim_wrapper": ADAMW,
        "default_hooks": {"logger": {"interval": RECORD}, "nan_check": {"interval": RECORD}, "checkpoint": None},
        **case,
        "model": case.get("model", Net)(),
        "train_cfg": {"by_epoch": False, "max_iters": STEPS, **case.get("train_cfg", {})},
        "custom_hooks": hooks,
        "log_level": "ERROR",
    }
    return Runner(work_dir=folder, **options)


def by_hand(folder: Path, waits: Waits) -> None:
    options: dict[str, Any] = {"default_hooks": {"logger": {"interval": RECORD}}, "custom_hooks": [waits]}
    session = Session(folder, strategy="ddp", log_level="ERROR", **options)
    model = Net()
    model, _, batches = session.prepare(model, torch.optim.AdamW(model.parameters()), loader())
    for _ in session.epochs(1):
        for x, y in batches:
            assert x.device.type == DEVICE
            session.step(model(x, y))


def main(folder: Path) -> None:
    sim = simulator()
    dist.init_dist("pytorch", timeout=120)
    found: dict[str, Any] = {}
    for name, case in {**CASES, "session": {}}.items():
        torch.manual_seed(0)
        waits = Waits(sim.host_reads)
        if name == "session":
            by_hand(folder / "session", waits)
        else:
            runner(folder / name.replace(" ", "_"), case, waits).train()
        found[name] = waits.by_step()
    (folder / f"rank_{dist.get_rank()}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
