"""The Runner, and the loops it runs."""

from __future__ import annotations

from lockstep.runner.eval_loops import TestLoop, ValLoop
from lockstep.runner.loops import EpochBasedTrainLoop, IterBasedTrainLoop
from lockstep.runner.runner import FlexibleRunner, Runner

__all__ = [
    "EpochBasedTrainLoop",
    "FlexibleRunner",
    "IterBasedTrainLoop",
    "Runner",
    "TestLoop",
    "ValLoop",
]
