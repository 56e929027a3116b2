"""A run that goes on under DeepSpeed, and under another strategy after it, in the same processes."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any
from weakref import ref

import pytest
import torch
from torch.utils.data import TensorDataset

from lockstep.hooks import Hook
from lockstep.runner import Runner
from lockstep.testing import run_ranks

from ...strategy.transformer import BATCH, INPUTS, STEPS, TARGETS, optim_config, seeded
from .training import config_of


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


def switched(work_dir: Path, stage: str) -> None:
    whole = train(work_dir / "whole", {})
    watch = train(work_dir / "switched", {4: config_of(stage), 10: "fsdp", 14: config_of(stage), 17: "ddp"})
    torch.testing.assert_close(torch.tensor(whole.losses), torch.tensor(watch.losses), rtol=0, atol=1e-6)
    assert watch.strategies == [
        *["DDPStrategy"] * 4, *["DeepSpeedStrategy"] * 6, *["FSDPStrategy"] * 4, *["DeepSpeedStrategy"] * 3,
        *["DDPStrategy"] * (STEPS - 17),
    ]  # fmt: skip
    assert watch.alive == [0] * 5


@pytest.mark.parametrize("stage", ["zero2", "zero3"])
def test_ddp_deepspeed_fsdp_deepspeed_ddp(stage: str, tmp_path: Path):
    run_ranks(2, switched, tmp_path, stage)
