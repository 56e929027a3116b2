"""Models: what a training step is made of, and the wrappers that lay a model over ranks."""

from __future__ import annotations

from lockstep.model.base import BaseModel
from lockstep.model.ddp import MMDistributedDataParallel, is_model_wrapper
from lockstep.model.preprocessor import BaseDataPreprocessor
from lockstep.model.steps import (
    UpdatesParams,
    parse_losses,
    predict_step,
    train_step,
    unwrap_model,
)

__all__ = [
    "BaseDataPreprocessor",
    "BaseModel",
    "MMDistributedDataParallel",
    "UpdatesParams",
    "is_model_wrapper",
    "parse_losses",
    "predict_step",
    "train_step",
    "unwrap_model",
]
