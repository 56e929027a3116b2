"""Train, and save to a bucket: `training_job.py WORK_DIR OUT_DIR EPOCHS`, or `train`; see the variables that it reads.

- `DIE_IN`: the checkpoint during whose save both ranks are killed.
- `BREAK_AFTER`: the epoch after which rank 0 ends the server, whose process is in `SERVER`.
- `ON_SAVE_ERROR`: the argument of CheckpointHook.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from lockstep.dist import get_rank
from lockstep.hooks import Hook
from lockstep.location import RemotePath
from lockstep.runner import Runner


class Watch(Hook):
    """Note losses, and end the server."""

    def __init__(self) -> None:
        self.losses: dict[int, float] = {}

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        self.losses[runner.iter] = outputs["loss"].item()

    def after_train_epoch(self, runner: Any) -> None:
        if str(runner.epoch + 1) == os.environ.get("BREAK_AFTER") and runner.rank == 0:
            with suppress(ProcessLookupError):
                os.kill(int(os.environ["SERVER"]), signal.SIGKILL)


def train(work_dir: Any, out_dir: str | None, epochs: int, *, world_size: int = 1, **changes: Any) -> dict[int, float]:
    """Train, and return the losses by iteration.

    Args:
        work_dir: the work_dir.
        out_dir: that of CheckpointHook.
        epochs: how many, of 8 iterations.
        world_size: number of ranks.
        changes: arguments of CheckpointHook, and `resume` and `load_from`.
    """
    torch.manual_seed(0)
    x = torch.randn(32, 6)
    watch = Watch()
    dataset = TensorDataset(x, x.sum(1, keepdim=True))
    arguments = {name: changes.pop(name) for name in ("resume", "load_from") if name in changes}
    Runner(
        nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1)),
        work_dir,
        train_dataloader={"dataset": dataset, "batch_size": 4 // world_size, "sampler": {"shuffle": True}},
        loss=nn.MSELoss(),
        train_cfg={"max_epochs": epochs},
        optim_wrapper={"optimizer": {"type": "AdamW", "lr": 0.02}},
        default_hooks={"checkpoint": {"interval": 1, "max_keep_ckpts": 2, "out_dir": out_dir, **changes}},
        strategy="fsdp" if world_size > 1 else "single",
        custom_hooks=[watch],
        randomness={"seed": 3},
        **arguments,
    ).train()
    return watch.losses


def die_in(checkpoint: str) -> None:
    """Kill rank 1 when it is about to send its file, and rank 0 when it has sent its own."""
    sending = RemotePath.sending

    @contextmanager
    def dying(self: RemotePath, size: int) -> Iterator[Any]:
        with sending(self, size) as sender:
            if f"/{checkpoint}/" in self.url and get_rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            yield sender
        if f"/{checkpoint}/" in self.url:
            os.kill(os.getpid(), signal.SIGKILL)

    RemotePath.sending = dying


if __name__ == "__main__":
    if "DIE_IN" in os.environ:
        die_in(os.environ["DIE_IN"])
    choice = os.environ.get("ON_SAVE_ERROR", "raise")
    train(sys.argv[1], sys.argv[2], int(sys.argv[3]), world_size=int(os.environ["WORLD_SIZE"]), on_save_error=choice)
