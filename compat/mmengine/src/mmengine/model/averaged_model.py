"""Averages of a model's weights: lockstep's."""

from __future__ import annotations

from lockstep.model import (
    BaseAveragedModel,
    ExponentialMovingAverage,
    MomentumAnnealingEMA,
    StochasticWeightAverage,
)

__all__ = ["BaseAveragedModel", "ExponentialMovingAverage", "MomentumAnnealingEMA", "StochasticWeightAverage"]
