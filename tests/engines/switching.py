"""A run that goes on under an engine, and under another strategy after it, in the same processes."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any
from weakref import ref

import torch
from torch.utils.data import TensorDataset

from lockstep.hooks import Hook
from lockstep.runner import Runner

from ..strategy.transformer import BATCH, INPUTS, STEPS, TARGETS, optim_config, seeded


class Watch(Hook):
    """Asks for strategies after the iterations of their keys; notes losses, and the models that are left."""

    priority = "VERY_LOW"

    def __init__(self, plan: dict[int, Any]) -> None:
        self.plan = plan
        self.losses: list[float] = []
        self.strategies: list[str] = []
        self.held: list[ref[Any]] = []
        self.alive: list[int] = []

    def before_train(self, runner) -> None:
        gc.collect()
        self.alive.append(sum(held() is not None for held in self.held))
        weight = next(runner.model.parameters())
        # At ZeRO stage 3, what holds memory is not the parameter itself.
        self.held += [ref(runner.optim_wrapper), ref(getattr(weight, "ds_tensor", weight))]

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None) -> None:
        self.losses.append(float(outputs["loss"]))
        self.strategies.append(type(runner.strategy).__name__)
        if runner.iter + 1 in self.plan:
            runner.switch_strategy(self.plan[runner.iter + 1])


def train(work_dir: Path, plan: dict[int, Any]) -> Watch:
    watch = Watch(plan)
    Runner(
        seeded,
        work_dir,
        train_dataloader={"dataset": TensorDataset(INPUTS, TARGETS), "batch_size": BATCH // 2, "shuffle": False},
        train_cfg={"max_iters": STEPS},
        optim_wrapper=optim_config(1, True),
        param_scheduler={"type": "LinearLR", "by_epoch": False, "end": 15},
        default_hooks={"checkpoint": None},
        custom_hooks=[watch],
        randomness={"seed": 7},
        visualizer=[],
    ).train()
    return watch


def switch_to_and_fro(work_dir: Path, engine: Any) -> None:
    """Train under DDP, the engine, FSDP, the engine and DDP, and compare with a training under DDP alone."""
    whole = train(work_dir / "whole", {})
    watch = train(work_dir / "switched", {4: engine, 10: "fsdp", 14: engine, 17: "ddp"})
    torch.testing.assert_close(torch.tensor(whole.losses), torch.tensor(watch.losses), rtol=0, atol=1e-6)
    ddp, under_engine, fsdp = (watch.strategies[index] for index in (0, 4, 10))
    assert len({ddp, under_engine, fsdp}) == 3
    assert watch.strategies == [
        *[ddp] * 4, *[under_engine] * 6, *[fsdp] * 4, *[under_engine] * 3, *[ddp] * (STEPS - 17)
    ]  # fmt: skip
    assert watch.alive == [0] * 5  # nothing of a model before is in memory
