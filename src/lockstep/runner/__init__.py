"""The Runner, the run that it builds, and the loops of a run."""

from __future__ import annotations

from lockstep.runner.evaluation_loops import TestLoop, ValLoop
from lockstep.runner.loops import EpochBasedTrainLoop, IterBasedTrainLoop
from lockstep.runner.run import Run, TrainRun
from lockstep.runner.runner import FlexibleRunner, Runner
from lockstep.weights import load_checkpoint

__all__ = [
    "EpochBasedTrainLoop",
    "FlexibleRunner",
    "IterBasedTrainLoop",
    "Run",
    "Runner",
    "TestLoop",
    "TrainRun",
    "ValLoop",
    "load_checkpoint",
]
