"""Small trainings into which a fault is injected on one rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lockstep.dist import get_rank
from lockstep.hooks import Hook
from lockstep.runner import Runner

STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp": {"type": "ddp"},
    "fsdp": {"type": "fsdp"},
    "hybrid": {"type": "fsdp", "device_mesh": (2, 2)},
    "tensor": {"type": "fsdp", "tensor_parallel": {"degree": 2, "plan": {"0.up": "colwise", "0.down": "rowwise"}}},
}
QUIET = {"progress": None, "checkpoint": None}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.dropout = nn.Dropout(0.1)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 8))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(self.up(self.norm(x) * self.scale).relu()))


def make_model() -> nn.Sequential:
    """Return a network whose weights begin alike on every rank, with a BatchNorm that normalises on each rank."""
    torch.manual_seed(0)
    return nn.Sequential(Block(), nn.BatchNorm1d(8), nn.Linear(8, 8))


def make_runner(
    work_dir: Path, strategy: str | dict[str, Any] | None, hooks: list[Any], iters: int, **changes: Any
) -> Runner:
    """Return a runner; `strategy` is a name in `STRATEGIES`, or anything that a Runner takes."""
    data = torch.randn(96, 8, generator=torch.Generator().manual_seed(1))
    return Runner(
        **{
            "model": make_model(),
            "work_dir": work_dir,
            "loss": nn.MSELoss(),
            "train_dataloader": {"dataset": TensorDataset(data, data.roll(1, 1)), "batch_size": 4},
            "train_cfg": {"by_epoch": False, "max_iters": iters},
            "optim_wrapper": {"optimizer": {"type": "AdamW", "lr": 1e-3}},
            "strategy": STRATEGIES[strategy] if isinstance(strategy, str) else strategy,
            "custom_hooks": hooks,
            "default_hooks": QUIET,
            "randomness": {"seed": 7},
            "visualizer": [],
            **changes,
        }
    )


def bits_of(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor, as a view of its bits that can be changed in place."""
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.detach().view(-1).view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


class FlipBit(Hook):
    """Flips one bit on one rank after an iteration, as faulty memory would.

    Args:
        what: `"weight"`, `"buffer"`, `"exp_avg"`, `"exp_avg_sq"`, `"step"` or `"lr"`.
        rank: on which rank.
        after: after how many iterations.
        bit: which one; some updates later, the lowest may have been rounded away.
    """

    priority = "HIGH"

    def __init__(self, what: str, rank: int, after: int, bit: int = 0) -> None:
        self.what, self.rank, self.after, self.bit = what, rank, after, bit

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None) -> None:
        if runner.iter + 1 != self.after or get_rank() != self.rank:
            return
        parameters = dict(runner.strategy.core().named_parameters())
        optimizer = runner.optim_wrapper.optimizer
        if self.what == "lr":
            optimizer.param_groups[0]["lr"] *= 1 + 2**-52
            return
        if self.what == "weight":
            tensor = parameters["0.up.weight"]
        elif self.what == "buffer":
            tensor = runner.strategy.core().get_buffer("0.scale")
        else:
            tensor = optimizer.state[parameters["0.up.weight"]][self.what]
        bits_of(tensor)[-1] ^= 1 << self.bit
