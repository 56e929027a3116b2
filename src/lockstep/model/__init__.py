"""Models: the training step of a model, and the wrappers that distribute a model over ranks.

Everything that needs torch's FSDP is imported on first use, because that import takes longer than all others together.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lockstep.model.averaged import (
    BaseAveragedModel,
    ExponentialMovingAverage,
    MomentumAnnealingEMA,
    StochasticWeightAverage,
)
from lockstep.model.base import BaseModel, BaseModule
from lockstep.model.compiling import compile_in_place, uncompiled
from lockstep.model.ddp import MMDistributedDataParallel
from lockstep.model.ddp_separate import MMSeparateDistributedDataParallel
from lockstep.model.image import ImgDataPreprocessor
from lockstep.model.norm import convert_sync_batchnorm, revert_sync_batchnorm
from lockstep.model.outside_loss import OutsideLoss, outside_loss
from lockstep.model.parts import checkpoint_activations
from lockstep.model.preprocessor import BaseDataPreprocessor
from lockstep.model.steps import UpdatesParams, parse_losses
from lockstep.model.wrapper import (
    ModelWrapper,
    is_model_wrapper,
    predict_step,
    step_of,
    train_step,
    train_step_of,
    unwrap_model,
)

if TYPE_CHECKING:
    from lockstep.model.fsdp import MMFullyShardedDataParallel
    from lockstep.model.fsdp.units import FSDP_WRAP_POLICIES

_HOMES = {"MMFullyShardedDataParallel": "lockstep.model.fsdp", "FSDP_WRAP_POLICIES": "lockstep.model.fsdp.units"}

__all__ = [
    "FSDP_WRAP_POLICIES",
    "BaseAveragedModel",
    "BaseDataPreprocessor",
    "BaseModel",
    "BaseModule",
    "ExponentialMovingAverage",
    "ImgDataPreprocessor",
    "MMDistributedDataParallel",
    "MMFullyShardedDataParallel",
    "MMSeparateDistributedDataParallel",
    "ModelWrapper",
    "MomentumAnnealingEMA",
    "OutsideLoss",
    "StochasticWeightAverage",
    "UpdatesParams",
    "checkpoint_activations",
    "compile_in_place",
    "convert_sync_batchnorm",
    "is_model_wrapper",
    "outside_loss",
    "parse_losses",
    "predict_step",
    "revert_sync_batchnorm",
    "step_of",
    "train_step",
    "train_step_of",
    "uncompiled",
    "unwrap_model",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
