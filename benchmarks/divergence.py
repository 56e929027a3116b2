"""What ReplicaCheckHook costs: a check beside a training step, on ranks of one CPU core each.

python -m benchmarks.divergence [RANKS]
"""

from __future__ import annotations

import os
import sys
import tempfile
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from benchmarks.training import Classifier
from lockstep import Runner, dist
from lockstep.hooks import ReplicaCheckHook
from lockstep.launch import JobSpec, launch

STEPS = 60
_CHECKED_EVERY = 5


class Encoder(nn.Module):
    """A transformer with many small tensors, which returns its loss."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True)
        self.layers, self.head = nn.TransformerEncoder(layer, layers), nn.Linear(width, 10)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.head(self.layers(inputs).mean(1)), targets)


# The model, the shape of a sample, and samples per step and rank; the smallest steps are the hardest case.
CASES: dict[str, tuple[Any, tuple[int, ...], int]] = {
    "perceptron, width 384, batch 32": (lambda: Classifier(384), (384,), 32),
    "perceptron, width 2048, batch 1": (lambda: Classifier(2048), (2048,), 1),
    "transformer, 12 layers of 128, one sequence of 16": (lambda: Encoder(12, 128), (16, 128), 1),
    "transformer, 6 layers of 256, 8 sequences of 64": (lambda: Encoder(6, 256), (64, 256), 8),
}


class _Timed(ReplicaCheckHook):
    """Times its checks, and the steps between them."""

    def __init__(self) -> None:
        super().__init__(interval=_CHECKED_EVERY)
        self.checks: list[float] = []
        self.steps: list[float] = []
        self._last = 0.0

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        now = perf_counter()
        self.steps.append(now - self._last)
        super().after_train_iter(runner, batch_idx, data_batch, outputs)
        self._last = perf_counter()
        if (runner.iter + 1) % self.interval == 0:
            self.checks.append(self._last - now)


def main() -> None:
    """Measure on one rank; rank 0 prints."""
    torch.set_num_threads(1)
    dist.init_dist("pytorch")
    for name, (make, shape, batch) in CASES.items():
        torch.manual_seed(0)
        count = STEPS * batch * dist.get_world_size()
        data = TensorDataset(torch.randn(count, *shape), torch.randint(0, 10, (count,)))
        timed = _Timed()
        with tempfile.TemporaryDirectory() as folder:
            Runner(
                make(), folder, train_dataloader={"dataset": data, "batch_size": batch}, custom_hooks=[timed],
                train_cfg={"by_epoch": False, "max_iters": STEPS}, visualizer=[], log_level="ERROR",
                optim_wrapper={"optimizer": {"type": "AdamW", "lr": 1e-4, "fused": True}},
                default_hooks={"checkpoint": None, "progress": None},
            ).train()  # fmt: skip
        if dist.is_main_process():
            check, step = median(timed.checks), median(timed.steps[5:])
            share = check / (step * ReplicaCheckHook().interval)
            print(f"{name}: step {1e3 * step:.2f} ms, check {1e3 * check:.2f} ms, {share:.2%} at the default interval")


if __name__ == "__main__":
    if "RANK" in os.environ:
        main()
    else:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        launch(["-m", "benchmarks.divergence"], JobSpec(int(sys.argv[1]) if len(sys.argv) > 1 else 2))
