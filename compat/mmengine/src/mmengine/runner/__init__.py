"""The Runner, its loops and checkpoints."""

from __future__ import annotations

from lockstep.runner import FlexibleRunner
from mmengine.runner.amp import autocast
from mmengine.runner.base_loop import BaseLoop
from mmengine.runner.checkpoint import (
    CheckpointLoader,
    find_latest_checkpoint,
    get_state_dict,
    load_checkpoint,
    load_state_dict,
    save_checkpoint,
    weights_to_cpu,
)
from mmengine.runner.loops import EpochBasedTrainLoop, IterBasedTrainLoop, TestLoop, ValLoop
from mmengine.runner.priority import Priority, get_priority
from mmengine.runner.runner import Runner
from mmengine.runner.utils import set_random_seed

__all__ = [
    "BaseLoop",
    "CheckpointLoader",
    "EpochBasedTrainLoop",
    "FlexibleRunner",
    "IterBasedTrainLoop",
    "Priority",
    "Runner",
    "TestLoop",
    "ValLoop",
    "autocast",
    "find_latest_checkpoint",
    "get_priority",
    "get_state_dict",
    "load_checkpoint",
    "load_state_dict",
    "save_checkpoint",
    "set_random_seed",
    "weights_to_cpu",
]
