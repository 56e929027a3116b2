"""Optimizers and schedules."""

from __future__ import annotations

from mmengine.optim import optimizer as _optimizer
from mmengine.optim import scheduler as _scheduler
from mmengine.optim.optimizer import *  # noqa: F403 - its __all__
from mmengine.optim.scheduler import *  # noqa: F403
from mmengine.optim.scheduler.param_scheduler import _ParamScheduler as _ParamScheduler

__all__: list[str] = []
__all__ += _optimizer.__all__
__all__ += _scheduler.__all__
