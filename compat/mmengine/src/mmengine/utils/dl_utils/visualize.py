"""Tensors as images."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["tensor2imgs"]


def tensor2imgs(
    tensor: Tensor,
    mean: tuple[float, ...] | None = None,
    std: tuple[float, ...] | None = None,
    to_bgr: bool = True,
) -> list[np.ndarray[Any, Any]]:
    """Return a batch of normalised images as 8-bit images.

    Args:
        tensor: [batch, channels, height, width], with 1 or 3 channels.
        mean: what was subtracted from each channel; by default 0.
        std: by what it was divided; by default 1.
        to_bgr: reverse the order of 3 channels.

    Returns:
        Contiguous arrays of uint8: [height, width, channels].
    """
    if not isinstance(tensor, Tensor) or tensor.ndim != 4:
        raise AssertionError(f"`tensor` must be a tensor of 4 dims, but is {tensor!r}")
    channels = tensor.shape[1]
    mean, std = mean or (0.0,) * channels, std or (1.0,) * channels
    if channels not in (1, 3) or not len(mean) == len(std) == channels:
        raise AssertionError(f"there must be 1 or 3 channels, each with `mean` and `std`, but they are {channels}")
    if channels == 1 and to_bgr:
        raise AssertionError("`to_bgr` must be False for images of one channel")
    images = tensor.detach().float().cpu() * torch.tensor(std).view(-1, 1, 1) + torch.tensor(mean).view(-1, 1, 1)
    if to_bgr:
        images = images.flip(1)
    pixels = images.permute(0, 2, 3, 1).numpy()
    return [np.ascontiguousarray(image.clip(0, 255).astype(np.uint8)) for image in pixels]
