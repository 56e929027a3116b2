"""A rank that trains on the simulated accelerator in many ways, and counts how often its host waits for the device.

Usage: loop.py FOLDER; it writes what it has found, as JSON. `test_loop.py` says what is right.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))

from sim import counts, simulator
from torch import Tensor, nn
from torch.utils.data import IterableDataset, TensorDataset

from lockstep import Runner, Session, dist
from lockstep.evaluator import BaseMetric
from lockstep.hooks import Hook

DEVICE = "sim"
STEPS = 24
RECORD = 8  # iterations from one record to the next
SIZE = 4  # samples of a batch


class Waits(Hook):
    """Notes after each step how often the host has waited for the device so far."""

    priority = "LOWEST"

    def __init__(self) -> None:
        self.seen: list[int] = []
        self.losses: list[Tensor] = []

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        self.losses.append(outputs["loss"])
        self.seen.append(sum(counts()[name] for name in ("reads", "copies", "waits")))

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


class Own(Net):
    """With steps of its own, which get their batches on the device."""

    def train_step(self, data: Any, optim_wrapper: Any) -> dict[str, Tensor]:
        assert data[0].device.type == DEVICE
        loss = self(*data)["loss"]
        optim_wrapper.update_params(loss)
        return {"loss": loss.detach()}

    def val_step(self, data: Any) -> Any:
        assert data[0].device.type == DEVICE
        return self.layers(data[0]), data[1]


class OfTensor(torch.optim.AdamW):
    """Has its rate in a tensor on the device, which all groups share, as a captured step needs."""

    def __init__(self, params: Any, lr: float) -> None:
        groups = [{**group, "params": [one]} for group in params for one in group["params"]]
        super().__init__(groups, lr=torch.full((), lr, device=DEVICE), capturable=True, foreach=False)


DATA = TensorDataset(torch.arange(4.0 * SIZE * STEPS).view(-1, 2) / 64, torch.ones(2 * SIZE * STEPS, 1))


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield from (DATA[index] for index in range(len(DATA)))


def loader(**changes: Any) -> dict[str, Any]:
    return {"dataset": DATA, "batch_size": SIZE, "shuffle": False, **changes}


class Distance(BaseMetric):
    def process(self, data_batch: Any, data_samples: Any) -> None:
        predicted, wanted = data_samples
        self.results.append((predicted - wanted).square().mean())

    def compute_metrics(self, results: list[Tensor]) -> dict[str, float]:
        return {"distance": torch.stack(results).mean().item()}


ADAMW = {"optimizer": {"type": "AdamW", "lr": 0.01}, "clip_grad": {"max_norm": 1.0}}
# What is unlike a plain training.
CASES: dict[str, dict[str, Any]] = {
    "ddp": {"model": lambda: Net(nn.BatchNorm1d(4))},
    "fsdp": {"strategy": "fsdp"},
    "fsdp with a parameter of dimension 0": {"strategy": "fsdp", "model": Scaled},
    "own steps": {"model": Own, "val_dataloader": loader(), "val_evaluator": {"type": Distance}},
    "a stream": {"train_dataloader": loader(dataset=Stream())},
    "batch_size_of": {"train_cfg": {"batch_size_of": lambda batch: batch[0].shape[0]}},
    "workers": {"train_dataloader": loader(num_workers=1)},
    "prefetching": {"prefetch_to_device": True},
    "amp": {"optim_wrapper": {**ADAMW, "type": "AmpOptimWrapper", "dtype": "bfloat16"}},
    "float16": {"optim_wrapper": {**ADAMW, "type": "AmpOptimWrapper", "dtype": "float16"}},
    "accumulation": {"optim_wrapper": {**ADAMW, "accumulative_counts": 2}},
    "a rate in a tensor": {
        "optim_wrapper": {"optimizer": {"type": OfTensor, "lr": 0.01}},
        "param_scheduler": [
            {"type": "LinearLR", "by_epoch": False, "start_factor": 0.1, "end": STEPS // 2},
            {"type": "CosineAnnealingLR", "by_epoch": False},
        ],
    },
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
    simulator()
    dist.init_dist("pytorch", timeout=120)
    found: dict[str, Any] = {}
    for name, case in {**CASES, "session": {}}.items():
        torch.manual_seed(0)
        waits = Waits()
        if name == "session":
            by_hand(folder / "session", waits)
        else:
            runner(folder / name.replace(" ", "_"), case, waits).train()
        records = (folder / name.replace(" ", "_")).glob("*/metrics.jsonl")
        names = {key for file in records for line in file.read_text().splitlines() for key in json.loads(line)}
        found[name] = {
            "names": sorted(names),
            "waits": waits.by_step(),
            "losses": torch.stack(waits.losses).cpu().tolist(),
        }
    (folder / f"rank_{dist.get_rank()}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
