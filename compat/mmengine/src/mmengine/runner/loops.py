"""Loops: lockstep's, where MMEngine has them."""

from __future__ import annotations

from lockstep.runner import EpochBasedTrainLoop, IterBasedTrainLoop, TestLoop, ValLoop

__all__ = ["EpochBasedTrainLoop", "IterBasedTrainLoop", "TestLoop", "ValLoop"]
