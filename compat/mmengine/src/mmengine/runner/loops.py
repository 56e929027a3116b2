"""Loops: lockstep's, where MMEngine has them. Evaluations draw random numbers from those of the training, as there."""

from __future__ import annotations

from typing import Any, Self

import lockstep.runner
from lockstep.dataset import set_epoch
from lockstep.runner import EpochBasedTrainLoop, IterBasedTrainLoop
from mmengine.registry import LOOPS

__all__ = ["EpochBasedTrainLoop", "IterBasedTrainLoop", "TestLoop", "ValLoop"]


@LOOPS.register_module()
class ValLoop(lockstep.runner.ValLoop):
    """One pass through the validation data; see `lockstep.runner.ValLoop`."""

    keeps_random_state = False


@LOOPS.register_module()
class TestLoop(lockstep.runner.TestLoop):
    """One pass through the test data; see `lockstep.runner.TestLoop`."""

    keeps_random_state = False


class _InfiniteDataloaderIterator:
    """The batches of a data loader, pass after pass without an end; each pass is an epoch to its sampler.

    Args:
        dataloader: the data loader.
    """

    def __init__(self, dataloader: Any) -> None:
        self._dataloader = dataloader
        self._iterator = iter(dataloader)
        self._epoch = 0

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        try:
            return next(self._iterator)
        except StopIteration:
            self._epoch += 1
            set_epoch(self._dataloader, self._epoch)
            self._iterator = iter(self._dataloader)
            return next(self._iterator)
