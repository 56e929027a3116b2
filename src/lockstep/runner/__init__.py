"""The Runner, the run that it builds, and the loops of a run."""

from __future__ import annotations

from lockstep.runner.batch_size_finder import BatchSizeSearch, find_batch_size
from lockstep.runner.evaluation_loops import TestLoop, ValLoop
from lockstep.runner.loops import EpochBasedTrainLoop, IterBasedTrainLoop
from lockstep.runner.lr_finder import LRSearch
from lockstep.runner.run import Run, TrainRun
from lockstep.runner.runner import FlexibleRunner, Runner
from lockstep.runner.seeds import set_random_seed
from lockstep.runner.session import Session
from lockstep.weights import load_checkpoint

__all__ = [
    "BatchSizeSearch",
    "EpochBasedTrainLoop",
    "FlexibleRunner",
    "IterBasedTrainLoop",
    "LRSearch",
    "Run",
    "Runner",
    "Session",
    "TestLoop",
    "TrainRun",
    "ValLoop",
    "find_batch_size",
    "load_checkpoint",
    "set_random_seed",
]
