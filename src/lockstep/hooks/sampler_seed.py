"""A hook that gives the samples a new order in every epoch."""

from __future__ import annotations

from lockstep.dataset import set_epoch
from lockstep.registry import HOOKS
from lockstep.runner.hook import Hook
from lockstep.runner.run import TrainRun


@HOOKS.register_module()
class DistSamplerSeedHook(Hook):
    """Tell the training data which epoch begins; the name is MMEngine's."""

    def before_train_epoch(self, runner: TrainRun) -> None:
        """Call `set_epoch` of the sampler and of the datasets, where they have it, and seed the workers anew."""
        set_epoch(runner.train_dataloader, runner.epoch)
