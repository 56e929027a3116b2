"""`Runner`: lockstep's, with the functions of MMEngine's that packages call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.utils.data import DataLoader

import lockstep.runner
from lockstep.dataset import build_dataloader
from mmengine.registry import RUNNERS

__all__ = ["Runner"]


@RUNNERS.register_module()
class Runner(lockstep.runner.Runner):
    """lockstep's Runner under MMEngine's name."""

    @staticmethod
    def build_dataloader(
        dataloader: DataLoader[Any] | Mapping[str, Any], seed: int | None = None, diff_rank_seed: bool = False
    ) -> DataLoader[Any]:
        """Return the data loader that a config describes.

        Args:
            dataloader: a data loader, which is returned, or the config of one.
            seed: for the order of the samples and for the workers.
            diff_rank_seed: exists for MMEngine's callers; ranks share one order, of which each takes its share.
        """
        return dataloader if isinstance(dataloader, DataLoader) else build_dataloader(dataloader, seed=seed or 0)
