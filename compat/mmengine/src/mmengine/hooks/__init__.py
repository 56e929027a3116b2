"""Hooks: lockstep's, under the same names."""

from __future__ import annotations

from lockstep.hooks import (
    CheckpointHook,
    DistSamplerSeedHook,
    EarlyStoppingHook,
    EmptyCacheHook,
    Hook,
    IterTimerHook,
    LoggerHook,
    ParamSchedulerHook,
    ProfilerHook,
    RuntimeInfoHook,
    SyncBuffersHook,
)
from mmengine.hooks.ema_hook import EMAHook

__all__ = [
    "CheckpointHook",
    "DistSamplerSeedHook",
    "EMAHook",
    "EarlyStoppingHook",
    "EmptyCacheHook",
    "Hook",
    "IterTimerHook",
    "LoggerHook",
    "ParamSchedulerHook",
    "ProfilerHook",
    "RuntimeInfoHook",
    "SyncBuffersHook",
]
