"""Classes and facts of torch, under the path where MMEngine has them."""

from __future__ import annotations

import torch
from torch.nn.modules.batchnorm import SyncBatchNorm, _BatchNorm
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.modules.pooling import _AdaptiveAvgPoolNd, _AdaptiveMaxPoolNd, _AvgPoolNd, _MaxPoolNd
from torch.utils.data import DataLoader

TORCH_VERSION = torch.__version__
PoolDataLoader = DataLoader
_ConvTransposeMixin = _ConvTransposeNd
SyncBatchNorm_ = SyncBatchNorm

__all__ = [
    "TORCH_VERSION",
    "DataLoader",
    "PoolDataLoader",
    "SyncBatchNorm",
    "SyncBatchNorm_",
    "_AdaptiveAvgPoolNd",
    "_AdaptiveMaxPoolNd",
    "_AvgPoolNd",
    "_BatchNorm",
    "_ConvNd",
    "_ConvTransposeMixin",
    "_InstanceNorm",
    "_MaxPoolNd",
    "get_build_config",
    "is_cuda_available",
    "is_rocm_pytorch",
]


def is_rocm_pytorch() -> bool:
    """Return whether this torch is built for ROCm."""
    return torch.version.hip is not None


def get_build_config() -> str:
    """Return how torch was built, as text."""
    return torch.__config__.show()


def is_cuda_available() -> bool:
    """Return whether a CUDA (or ROCm) device can be used."""
    return torch.cuda.is_available()
