"""The Runner, and the loops it runs."""

from __future__ import annotations

from lockstep.runner.loops import EpochBasedTrainLoop, IterBasedTrainLoop, TestLoop, ValLoop
from lockstep.runner.runner import FlexibleRunner, Runner

__all__ = [
    "EpochBasedTrainLoop",
    "FlexibleRunner",
    "IterBasedTrainLoop",
    "Runner",
    "TestLoop",
    "ValLoop",
]
