"""A rank that trains under DDP on the simulated accelerator, of which the last one is slow at one thing.

Usage: slow.py FOLDER; rank 0 writes what it has recorded, by what was slow. `test_slow_ranks.py` says what is right.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from loop import DATA, Net, loader
from sim import simulator
from torch import Tensor
from torch.utils.data import TensorDataset

from lockstep import Runner, dist
from lockstep.hooks import Hook

SECONDS = 0.08
BEGIN, ITERATIONS = 15, 45
FAULTS = ("data", "forward", "hook", "nothing")


class Fault(Hook):
    """Lets the last rank sleep after some iterations, where it is asked to."""

    def __init__(self, what: str) -> None:
        self.what, self.iteration = what, 0

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        self.iteration = runner.iter + 1
        self.pause("hook")

    def pause(self, what: str) -> None:
        if what == self.what and self.iteration >= BEGIN and dist.get_rank() == dist.get_world_size() - 1:
            time.sleep(SECONDS)


class Data(TensorDataset):
    def __init__(self, fault: Fault) -> None:
        super().__init__(*DATA.tensors)
        self.fault = fault

    def __getitems__(self, indices: list[int]) -> list[Any]:
        self.fault.pause("data")
        return [self[index] for index in indices]


class Pausing(Net):
    def __init__(self, fault: Fault) -> None:
        super().__init__()
        self.fault = fault

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        self.fault.pause("forward")
        return super().forward(x, y)


def train(folder: Path, what: str) -> dict[str, Any]:
    fault = Fault(what)
    runner = Runner(
        Pausing(fault),
        folder,
        strategy="ddp",
        train_dataloader=loader(dataset=Data(fault)),
        train_cfg={"by_epoch": False, "max_iters": ITERATIONS},
        optim_wrapper={"optimizer": {"type": "SGD", "lr": 0.01}},
        default_hooks={"checkpoint": None, "progress": None},
        custom_hooks=[fault],
        log_level="ERROR",
    )
    runner.train()
    if dist.get_rank() != 0:
        return {}
    records = [json.loads(line) for line in (runner.run_dir / "metrics.jsonl").read_text().splitlines()]
    return {mode: [record for record in records if record["mode"] == mode] for mode in ("straggler", "train")}


def main(folder: Path) -> None:
    simulator()
    dist.init_dist("pytorch", timeout=60)
    found = {what: train(folder / what, what) for what in FAULTS}
    (folder / f"rank_{dist.get_rank()}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
