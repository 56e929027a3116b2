"""`RuntimeInfoHook`: lockstep's, which also puts learning rates into the message hub."""

from __future__ import annotations

from typing import Any

from torch import Tensor

import lockstep.hooks
from mmengine.registry import HOOKS

__all__ = ["RuntimeInfoHook"]


@HOOKS.register_module()
class RuntimeInfoHook(lockstep.hooks.RuntimeInfoHook):
    """Put metrics, and learning rates as `train/lr`, into the message hub; see `lockstep.hooks.RuntimeInfoHook`."""

    def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        """Put the learning rates of the iteration into the message hub."""
        rates = [group["lr"] for group in runner.optim_wrapper.param_groups]
        if any(isinstance(rate, Tensor) and not rate.is_cpu for rate in rates):
            return  # reading one would wait for the device in every iteration
        for name, own in runner.optim_wrapper.get_lr().items():
            runner.message_hub.update_scalar(f"train/{name}", own[0])
