"""`EMAHook`: lockstep's, with what subclasses of MMEngine's call and override."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import lockstep.hooks
from lockstep.runner.run import Run
from mmengine.registry import HOOKS

__all__ = ["EMAHook"]


@HOOKS.register_module()
class EMAHook(lockstep.hooks.EMAHook):
    """Average the model's weights during training; see `lockstep.hooks.EMAHook`.

    A subclass may swap the weights by itself, and so decide which are validated. If it overrides
    `after_load_checkpoint`, that is called for checkpoints of MMEngine's form alone: what a run saves, this class
    restores.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "after_load_checkpoint" in vars(cls):
            cls.after_load_checkpoint = _for_mmengines_form(cls.after_load_checkpoint)  # type: ignore[method-assign]

    def _swap_ema_parameters(self) -> None:
        """Replace the model's weights by the average, or put them back."""
        if self._trained_weights is None:
            lockstep.hooks.EMAHook.before_val_epoch(self, None)  # type: ignore[arg-type]
        else:
            self.close()

    def _swap_ema_state_dict(self, checkpoint: dict[str, Any]) -> None:
        """Exchange the weights and their averages in a checkpoint of MMEngine's form."""
        weights, averages = checkpoint["state_dict"], checkpoint["ema_state_dict"]
        for name in [one for one in averages if one.startswith("module.")]:
            plain = name.removeprefix("module.")
            weights[plain], averages[name] = averages[name], weights[plain]


def _for_mmengines_form(method: Callable[..., None]) -> Callable[..., None]:
    @wraps(method)
    def load(self: EMAHook, runner: Run, checkpoint: dict[str, Any]) -> None:
        if "model" not in checkpoint:
            method(self, runner, checkpoint)
        else:
            lockstep.hooks.EMAHook.after_load_checkpoint(self, runner, checkpoint)  # type: ignore[arg-type]

    return load
