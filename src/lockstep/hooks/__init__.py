"""The hooks that come with lockstep."""

from __future__ import annotations

from lockstep.hooks.buffers import SyncBuffersHook
from lockstep.hooks.checkpoint import CheckpointHook
from lockstep.hooks.early_stopping import EarlyStoppingHook
from lockstep.hooks.ema import EMAHook
from lockstep.hooks.empty_cache import EmptyCacheHook
from lockstep.hooks.garbage_collection import GarbageCollectionHook
from lockstep.hooks.logger import LoggerHook
from lockstep.hooks.memory_snapshot import MemorySnapshotHook
from lockstep.hooks.mfu import MFUHook
from lockstep.hooks.nan_check import NaNCheckHook
from lockstep.hooks.profiler import ProfilerHook
from lockstep.hooks.progress import ProgressHook
from lockstep.hooks.replica_check import ReplicaCheckHook
from lockstep.hooks.runtime_info import RuntimeInfoHook
from lockstep.hooks.sampler_seed import DistSamplerSeedHook
from lockstep.hooks.scheduler import ParamSchedulerHook
from lockstep.hooks.timer import IterTimerHook
from lockstep.runner.hook import PRIORITIES, Hook, HookList

__all__ = [
    "PRIORITIES",
    "CheckpointHook",
    "DistSamplerSeedHook",
    "EMAHook",
    "EarlyStoppingHook",
    "EmptyCacheHook",
    "GarbageCollectionHook",
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
