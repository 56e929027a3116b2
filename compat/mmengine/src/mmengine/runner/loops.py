"""Loops: lockstep's, where MMEngine has them. Evaluations draw random numbers from those of the training, as there."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import lockstep.runner
from lockstep.runner import EpochBasedTrainLoop, IterBasedTrainLoop
from mmengine.registry import LOOPS

__all__ = ["EpochBasedTrainLoop", "IterBasedTrainLoop", "TestLoop", "ValLoop"]


@LOOPS.register_module()
class ValLoop(lockstep.runner.ValLoop):
    """One pass through the validation data; see `lockstep.runner.ValLoop`."""

    def _randomness(self) -> AbstractContextManager[Any]:
        return nullcontext()


@LOOPS.register_module()
class TestLoop(lockstep.runner.TestLoop):
    """One pass through the test data; see `lockstep.runner.TestLoop`."""

    def _randomness(self) -> AbstractContextManager[Any]:
        return nullcontext()
