"""Loops: lockstep's, where MMEngine has them. Evaluations draw random numbers from those of the training, as there."""

from __future__ import annotations

import lockstep.runner
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
