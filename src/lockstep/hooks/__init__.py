"""What happens at the points of a loop."""

from __future__ import annotations

from lockstep.hooks.buffers import SyncBuffersHook
from lockstep.hooks.checkpoint import CheckpointHook
from lockstep.hooks.dispatch import HookList
from lockstep.hooks.hook import PRIORITIES, Hook
from lockstep.hooks.host import RunnerLike
from lockstep.hooks.logger import LoggerHook
from lockstep.hooks.progress import ProgressHook
from lockstep.hooks.sampler_seed import DistSamplerSeedHook
from lockstep.hooks.scheduler import ParamSchedulerHook
from lockstep.hooks.timer import IterTimerHook

__all__ = [
    "PRIORITIES",
    "CheckpointHook",
    "DistSamplerSeedHook",
    "Hook",
    "HookList",
    "IterTimerHook",
    "LoggerHook",
    "ParamSchedulerHook",
    "ProgressHook",
    "RunnerLike",
    "SyncBuffersHook",
]
