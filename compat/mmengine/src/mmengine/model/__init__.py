"""Models: base classes, initial weights, averages and wrappers."""

from __future__ import annotations

from typing import Any

from mmengine.model.averaged_model import (
    BaseAveragedModel,
    ExponentialMovingAverage,
    MomentumAnnealingEMA,
    StochasticWeightAverage,
)
from mmengine.model.base_model import BaseDataPreprocessor, BaseModel, ImgDataPreprocessor
from mmengine.model.base_module import BaseModule, ModuleDict, ModuleList, Sequential
from mmengine.model.test_time_aug import BaseTTAModel
from mmengine.model.utils import (
    convert_sync_batchnorm,
    detect_anomalous_params,
    merge_dict,
    revert_sync_batchnorm,
    stack_batch,
)
from mmengine.model.weight_init import (
    BaseInit,
    Caffe2XavierInit,
    ConstantInit,
    KaimingInit,
    NormalInit,
    PretrainedInit,
    TruncNormalInit,
    UniformInit,
    XavierInit,
    bias_init_with_prob,
    caffe2_xavier_init,
    constant_init,
    initialize,
    kaiming_init,
    normal_init,
    trunc_normal_init,
    uniform_init,
    update_init_info,
    xavier_init,
)
from mmengine.model.wrappers import MMDistributedDataParallel, MMSeparateDistributedDataParallel, is_model_wrapper

__all__ = [
    "BaseAveragedModel",
    "BaseDataPreprocessor",
    "BaseInit",
    "BaseModel",
    "BaseModule",
    "BaseTTAModel",
    "Caffe2XavierInit",
    "ConstantInit",
    "ExponentialMovingAverage",
    "ImgDataPreprocessor",
    "KaimingInit",
    "MMDistributedDataParallel",
    "MMSeparateDistributedDataParallel",
    "ModuleDict",
    "ModuleList",
    "MomentumAnnealingEMA",
    "NormalInit",
    "PretrainedInit",
    "Sequential",
    "StochasticWeightAverage",
    "TruncNormalInit",
    "UniformInit",
    "XavierInit",
    "bias_init_with_prob",
    "caffe2_xavier_init",
    "constant_init",
    "convert_sync_batchnorm",
    "detect_anomalous_params",
    "initialize",
    "is_model_wrapper",
    "kaiming_init",
    "merge_dict",
    "normal_init",
    "revert_sync_batchnorm",
    "stack_batch",
    "trunc_normal_init",
    "uniform_init",
    "update_init_info",
    "xavier_init",
]


def __getattr__(name: str) -> Any:
    if name == "MMFullyShardedDataParallel":  # imports FSDP, which takes longer than all others
        from mmengine.model import wrappers

        return wrappers.MMFullyShardedDataParallel
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
