"""Schedules of learning rates, momenta and other values."""

from __future__ import annotations

from mmengine.optim.scheduler import lr_scheduler as _rates
from mmengine.optim.scheduler import momentum_scheduler as _momenta
from mmengine.optim.scheduler import param_scheduler as _any
from mmengine.optim.scheduler.lr_scheduler import *  # noqa: F403 - its __all__
from mmengine.optim.scheduler.momentum_scheduler import *  # noqa: F403
from mmengine.optim.scheduler.param_scheduler import *  # noqa: F403

__all__: list[str] = []
__all__ += _rates.__all__
__all__ += _momenta.__all__
__all__ += _any.__all__
