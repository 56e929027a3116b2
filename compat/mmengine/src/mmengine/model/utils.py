"""Stacking images, joining dicts, finding parameters that a loss does not reach, and SyncBatchNorm."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.model import convert_sync_batchnorm, revert_sync_batchnorm
from lockstep.model.autograd_graph import leaves_of
from lockstep.model.norm import BatchNormXd as _BatchNormXd
from mmengine.logging import print_log

__all__ = [
    "_BatchNormXd",
    "convert_sync_batchnorm",
    "detect_anomalous_params",
    "merge_dict",
    "revert_sync_batchnorm",
    "stack_batch",
]


def stack_batch(tensor_list: Sequence[Tensor], pad_size_divisor: int = 1, pad_value: float = 0) -> Tensor:
    """Stack tensors whose sizes may differ; smaller ones are padded at the end of each dim but the first.

    Args:
        tensor_list: the tensors.
        pad_size_divisor: the sizes of the result, but of its first two dims, are rounded up to multiples of it.
        pad_value: value of the padding.

    **Shapes**: a list of [channels, *sizes] -> [tensors, channels, *greatest sizes].

    Raises:
        AssertionError: `tensor_list` is no list, is empty, or its tensors differ in the number of dims.
        RuntimeError: the tensors differ in the number of channels.

    Example:
        >>> stack_batch([torch.ones(3, 2, 5), torch.ones(3, 4, 1)], pad_size_divisor=4).shape
        torch.Size([2, 3, 4, 8])
    """
    if not isinstance(tensor_list, list) or not tensor_list:
        raise AssertionError(
            f"`tensor_list` must be a list of at least one tensor, but is {_shapes_in_words(tensor_list)}"
        )
    if len({tensor.ndim for tensor in tensor_list}) > 1:
        raise AssertionError(
            f"`tensor_list` must hold tensors of equally many dims, but holds {_shapes_in_words(tensor_list)}"
        )
    if len({tensor.shape[0] for tensor in tensor_list}) > 1:
        raise RuntimeError(
            f"`tensor_list` must hold tensors of equally many channels, but holds {_shapes_in_words(tensor_list)}"
        )
    first = tensor_list[0]
    greatest = (max(tensor.shape[dim] for tensor in tensor_list) for dim in range(1, first.ndim))
    sizes = [-(-size // pad_size_divisor) * pad_size_divisor for size in greatest]
    dtype = first.dtype
    for tensor in tensor_list:
        dtype = torch.promote_types(dtype, tensor.dtype)
    batch: Tensor = first.new_full((len(tensor_list), first.shape[0], *sizes), pad_value, dtype=dtype)
    for place, tensor in zip(batch, tensor_list, strict=True):
        place[tuple(slice(0, size) for size in tensor.shape)].copy_(tensor)
    return batch


def merge_dict(*args: Mapping[str, Any]) -> dict[str, Any]:
    """Return one dict with the entries of all; of entries with the same key, the last one counts."""
    return {key: value for given in args for key, value in given.items()}


def detect_anomalous_params(loss: Tensor, model: nn.Module) -> None:
    """Log an error for each parameter of `model` that the gradients of `loss` do not reach though it is to be trained.

    Under DDP such a parameter is an error, unless `find_unused_parameters` is set.
    """
    reached = leaves_of(loss)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter not in reached:
            print_log(
                f"the loss does not depend on `{name}` of shape {tuple(parameter.shape)}: it gets no gradient",
                logger="current",
                level=logging.ERROR,
            )


def _shapes_in_words(tensors: Any) -> str:
    if not isinstance(tensors, list):
        return f"of {type(tensors).__name__}"
    return f"[{', '.join(str(tuple(tensor.shape)) for tensor in tensors)}]"
