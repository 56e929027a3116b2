"""A new order of the samples in every epoch."""

from __future__ import annotations

from lockstep.dataset import set_epoch
from lockstep.hooks.hook import Hook
from lockstep.hooks.host import RunnerLike
from lockstep.registry import HOOKS


@HOOKS.register_module()
class DistSamplerSeedHook(Hook):
    """Tell the sampler of the training data which epoch begins."""

    def before_train_epoch(self, runner: RunnerLike) -> None:
        """Call `set_epoch` of the sampler, or of the batch sampler's, where there is one."""
        set_epoch(runner.train_dataloader, runner.epoch)
