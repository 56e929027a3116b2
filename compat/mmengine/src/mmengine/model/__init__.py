"""Models: lockstep's, under the same names."""

from __future__ import annotations

from lockstep.model import (
    BaseAveragedModel,
    BaseDataPreprocessor,
    BaseModel,
    BaseModule,
    ExponentialMovingAverage,
    ImgDataPreprocessor,
    MMDistributedDataParallel,
    MMSeparateDistributedDataParallel,
    MomentumAnnealingEMA,
    StochasticWeightAverage,
    convert_sync_batchnorm,
    is_model_wrapper,
    revert_sync_batchnorm,
)

__all__ = [
    "BaseAveragedModel",
    "BaseDataPreprocessor",
    "BaseModel",
    "BaseModule",
    "ExponentialMovingAverage",
    "ImgDataPreprocessor",
    "MMDistributedDataParallel",
    "MMSeparateDistributedDataParallel",
    "MomentumAnnealingEMA",
    "StochasticWeightAverage",
    "convert_sync_batchnorm",
    "is_model_wrapper",
    "revert_sync_batchnorm",
]
