"""The operators by which torch's SyncBatchNorm computes on devices, which it has for CUDA alone, for the device `sim`.

**Source**: what they are to compute is in `torch.nn.modules._functions.SyncBatchNorm` (2.13).
"""

from __future__ import annotations

import torch
from torch import Tensor


def register() -> None:
    """Let the device have these operators."""
    for function in (stats, gather_stats_with_counts, elemt, backward_reduce, backward_elemt):
        torch.library.impl(f"aten::batch_norm_{function.__name__}", "PrivateUse1", function)


def _per_channel(values: Tensor, like: Tensor) -> Tensor:
    return values.reshape(1, -1, *[1] * (like.dim() - 2))


def _sum(values: Tensor) -> Tensor:
    return values.sum([dim for dim in range(values.dim()) if dim != 1])


def stats(data: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    count = data.numel() // data.shape[1]
    mean = _sum(data) / count
    variance = _sum((data - _per_channel(mean, data)).square()) / count
    return mean, (variance + eps).rsqrt()


def gather_stats_with_counts(
    data: Tensor, means: Tensor, invstds: Tensor, running_mean: Tensor | None, running_var: Tensor | None,
    momentum: float, eps: float, counts: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    weights = (counts / counts.sum())[:, None]
    mean = (weights * means).sum(0)
    variance = (weights * (invstds.pow(-2) - eps + (means - mean).square())).sum(0)
    if running_mean is not None and running_var is not None:
        running_mean.lerp_(mean, momentum)
        running_var.lerp_(variance * (counts.sum() / (counts.sum() - 1)), momentum)
    return mean, (variance + eps).rsqrt()


def elemt(data: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, invstd: Tensor, eps: float) -> Tensor:
    scaled = (data - _per_channel(mean, data)) * _per_channel(invstd, data)
    scaled = scaled if weight is None else scaled * _per_channel(weight, data)
    return scaled if bias is None else scaled + _per_channel(bias, data)


def backward_reduce(
    grad: Tensor, data: Tensor, mean: Tensor, invstd: Tensor, weight: Tensor | None, *wanted: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    total, of_products = _sum(grad), _sum(grad * (data - _per_channel(mean, data)))
    return total, of_products, of_products * invstd, total.clone()


def backward_elemt(
    grad: Tensor, data: Tensor, mean: Tensor, invstd: Tensor, weight: Tensor | None, total: Tensor, of_products: Tensor,
    counts: Tensor,
) -> Tensor:  # fmt: skip
    count = counts.sum()
    along = (data - _per_channel(mean, data)) * _per_channel(invstd.square() * of_products / count, data)
    result = (grad - _per_channel(total / count, data) - along) * _per_channel(invstd, data)
    return result if weight is None else result * _per_channel(weight, data)
