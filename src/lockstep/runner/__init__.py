"""The Runner, and the loops it runs."""

from __future__ import annotations

from lockstep.runner.eval_loops import TestLoop, ValLoop
from lockstep.runner.loops import EpochBasedTrainLoop, IterBasedTrainLoop
from lockstep.runner.runner import FlexibleRunner, Runner
from lockstep.runner.seeds import set_random_seed
from lockstep.runner.weights import load_checkpoint

__all__ = [
    "EpochBasedTrainLoop",
    "FlexibleRunner",
    "IterBasedTrainLoop",
    "Runner",
    "TestLoop",
    "ValLoop",
    "load_checkpoint",
    "set_random_seed",
]
