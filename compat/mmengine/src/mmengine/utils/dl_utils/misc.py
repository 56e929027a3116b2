"""What a module is, and whether mmcv has operators."""

from __future__ import annotations

from importlib.util import find_spec

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

_NORMS = (_BatchNorm, _InstanceNorm, nn.GroupNorm, nn.LayerNorm)

__all__ = ["has_batch_norm", "is_norm", "mmcv_full_available", "torch_meshgrid"]


def is_norm(layer: nn.Module, exclude: type | tuple[type, ...] | None = None) -> bool:
    """Return whether a layer normalises (batch, instance, group or layer norm), and is none of `exclude`."""
    classes = () if exclude is None else exclude if isinstance(exclude, tuple) else (exclude,)
    if not all(isinstance(one, type) for one in classes):
        raise TypeError(f"`exclude` must be a class or a tuple of classes, but is {exclude!r}")
    return isinstance(layer, _NORMS) and not isinstance(layer, classes)


def has_batch_norm(model: nn.Module) -> bool:
    """Return whether a module is, or holds, a batch norm."""
    return any(isinstance(module, _BatchNorm) for module in model.modules())


def mmcv_full_available() -> bool:
    """Return whether mmcv is installed with its compiled operators."""
    return find_spec("mmcv") is not None and find_spec("mmcv._ext") is not None


def torch_meshgrid(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return `torch.meshgrid` with matrix indexing."""
    return torch.meshgrid(*tensors, indexing="ij")
