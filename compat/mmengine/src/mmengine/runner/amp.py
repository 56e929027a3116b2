"""Mixed precision as a context."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from lockstep.device import get_device

__all__ = ["autocast"]


@contextmanager
def autocast(
    device_type: str | None = None,
    dtype: torch.dtype | None = None,
    enabled: bool = True,
    cache_enabled: bool | None = None,
) -> Iterator[None]:
    """Compute in half precision inside the context, on the device that models are put on.

    Args:
        device_type: the type of the device; by default that of `get_device`.
        dtype: by default bfloat16 on the CPU and float16 elsewhere.
        enabled: whether to do so.
        cache_enabled: whether converted weights are kept until the end of the context.
    """
    kind = device_type or get_device()
    with torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=cache_enabled):
        yield
