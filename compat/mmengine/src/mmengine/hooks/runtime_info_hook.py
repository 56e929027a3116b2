"""`RuntimeInfoHook`: lockstep's, by the name that MMEngine's configs give it, with the infos of MMEngine's."""

from __future__ import annotations

from typing import Any

import lockstep.hooks
from lockstep.runner.run import Run, TrainRun
from mmengine.registry import HOOKS

__all__ = ["RuntimeInfoHook"]


@HOOKS.register_module()
class RuntimeInfoHook(lockstep.hooks.RuntimeInfoHook):
    """Put metrics and learning rates into the message hub; see `lockstep.hooks.RuntimeInfoHook`.

    As in MMEngine, the infos `epoch` and `iter` are those of the last epoch and iteration that have begun, also in a
    validation after them, and `cfg` is the text of the config.
    """

    def before_run(self, runner: Run) -> None:
        """Put the config's text into the message hub."""
        runner.message_hub.update_info("cfg", getattr(runner.cfg, "pretty_text", None))

    def before_train(self, runner: TrainRun) -> None:
        """Tell that it is the training, and how far it is."""
        super().before_train(runner)
        runner.message_hub.update_info_dict({"epoch": runner.epoch, "iter": runner.iter})

    def before_train_epoch(self, runner: TrainRun) -> None:
        """Tell the epoch."""
        runner.message_hub.update_info("epoch", runner.epoch)

    def before_train_iter(self, runner: TrainRun, batch_idx: int, data_batch: Any = None) -> None:
        """Tell the iteration and its learning rates."""
        runner.message_hub.update_info("iter", runner.iter)
        super().before_train_iter(runner, batch_idx, data_batch)
