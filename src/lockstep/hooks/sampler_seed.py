"""A hook that gives the samples a new order in every epoch."""

from __future__ import annotations

from lockstep.dataset import set_epoch
from lockstep.registry import HOOKS
from lockstep.runner.hook import Hook
from lockstep.runner.run import TrainRun


@HOOKS.register_module()
class DistSamplerSeedHook(Hook):
    """Tell the sampler of the training data which epoch begins."""

    def before_train_epoch(self, runner: TrainRun) -> None:
        """Call `set_epoch` of the sampler, or of the batch sampler's sampler, if it has one."""
        set_epoch(runner.train_dataloader, runner.epoch)
