"""A hook that notes the losses of its own rank: MMEngine records those of rank 0, and lockstep the means."""

from pathlib import Path

from mmengine.dist import get_rank
from mmengine.hooks import Hook
from mmengine.registry import HOOKS


@HOOKS.register_module()
class RankLosses(Hook):
    """Writes a loss a line to `losses_RANK.txt` in the work_dir."""

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        """Write the loss, in every bit."""
        with Path(runner.work_dir, f"losses_{get_rank()}.txt").open("a") as file:
            file.write(float(outputs["loss"]).hex() + "\n")
