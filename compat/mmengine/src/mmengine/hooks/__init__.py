"""Hooks: lockstep's under the same names, and those that only MMEngine has."""

from __future__ import annotations

from lockstep.hooks import (
    DistSamplerSeedHook,
    EarlyStoppingHook,
    EmptyCacheHook,
    Hook,
    IterTimerHook,
    ParamSchedulerHook,
    ProfilerHook,
    SyncBuffersHook,
)
from lockstep.runner.hook import POINTS, acts_at
from mmengine.hooks.checkpoint_hook import CheckpointHook
from mmengine.hooks.ema_hook import EMAHook
from mmengine.hooks.logger_hook import LoggerHook
from mmengine.hooks.naive_visualization_hook import NaiveVisualizationHook
from mmengine.hooks.runtime_info_hook import RuntimeInfoHook
from mmengine.hooks.test_time_aug_hook import PrepareTTAHook

# For code that asks at which points a hook acts; it may have derived its hooks from lockstep's class before.
Hook.stages = POINTS  # type: ignore[attr-defined]
Hook.get_triggered_stages = lambda self: [point for point in POINTS if acts_at(self, point)]  # type: ignore[attr-defined]

__all__ = [
    "CheckpointHook",
    "DistSamplerSeedHook",
    "EMAHook",
    "EarlyStoppingHook",
    "EmptyCacheHook",
    "Hook",
    "IterTimerHook",
    "LoggerHook",
    "NaiveVisualizationHook",
    "ParamSchedulerHook",
    "PrepareTTAHook",
    "ProfilerHook",
    "RuntimeInfoHook",
    "SyncBuffersHook",
]
