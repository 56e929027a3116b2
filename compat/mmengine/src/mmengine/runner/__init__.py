"""The Runner, its loops and checkpoints."""

from __future__ import annotations

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
from mmengine.runner.exporting import export_checkpoint
from mmengine.runner.log_processor import LogProcessor
from mmengine.runner.loops import EpochBasedTrainLoop, IterBasedTrainLoop, TestLoop, ValLoop
from mmengine.runner.priority import Priority, get_priority
from mmengine.runner.runner import FlexibleRunner, Runner
from mmengine.runner.utils import set_random_seed

__all__ = [
    "BaseLoop",
    "CheckpointLoader",
    "EpochBasedTrainLoop",
    "FlexibleRunner",
    "IterBasedTrainLoop",
    "LogProcessor",
    "Priority",
    "Runner",
    "TestLoop",
    "ValLoop",
    "autocast",
    "export_checkpoint",
    "find_latest_checkpoint",
    "get_priority",
    "get_state_dict",
    "load_checkpoint",
    "load_state_dict",
    "save_checkpoint",
    "set_random_seed",
    "weights_to_cpu",
]
