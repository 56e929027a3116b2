"""The Runner and its loops: lockstep's, under the same names."""

from __future__ import annotations

from lockstep.runner import (
    EpochBasedTrainLoop,
    FlexibleRunner,
    IterBasedTrainLoop,
    Runner,
    TestLoop,
    ValLoop,
    set_random_seed,
)

__all__ = [
    "EpochBasedTrainLoop",
    "FlexibleRunner",
    "IterBasedTrainLoop",
    "Runner",
    "TestLoop",
    "ValLoop",
    "set_random_seed",
]
