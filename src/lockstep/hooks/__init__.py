"""The hooks that come with lockstep."""

from __future__ import annotations

from lockstep.diagnostics import (
    IterTimerHook,
    MemorySnapshotHook,
    MFUHook,
    NaNCheckHook,
    ProfilerHook,
    ReplicaCheckHook,
)
from lockstep.hooks.buffers import SyncBuffersHook
from lockstep.hooks.checkpoint import CheckpointHook
from lockstep.hooks.early_stopping import EarlyStoppingHook
from lockstep.hooks.ema import EMAHook
from lockstep.hooks.epochs import DistSamplerSeedHook, EmptyCacheHook
from lockstep.hooks.logger import LoggerHook
from lockstep.hooks.progress import ProgressHook
from lockstep.hooks.runtime_info import RuntimeInfoHook
from lockstep.hooks.scheduler import ParamSchedulerHook
from lockstep.runner.hook import PRIORITIES, Hook, HookList

__all__ = [
    "PRIORITIES",
    "CheckpointHook",
    "DistSamplerSeedHook",
    "EMAHook",
    "EarlyStoppingHook",
    "EmptyCacheHook",
    "Hook",
    "HookList",
    "IterTimerHook",
    "LoggerHook",
    "MFUHook",
    "MemorySnapshotHook",
    "NaNCheckHook",
    "ParamSchedulerHook",
    "ProfilerHook",
    "ProgressHook",
    "ReplicaCheckHook",
    "RuntimeInfoHook",
    "SyncBuffersHook",
]
