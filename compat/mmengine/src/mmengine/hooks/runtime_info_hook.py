"""`RuntimeInfoHook`: lockstep's, by the name that MMEngine's configs give it."""

from __future__ import annotations

import lockstep.hooks
from mmengine.registry import HOOKS

__all__ = ["RuntimeInfoHook"]


@HOOKS.register_module()
class RuntimeInfoHook(lockstep.hooks.RuntimeInfoHook):
    """Put metrics and learning rates into the message hub; see `lockstep.hooks.RuntimeInfoHook`."""
