"""The order of an epoch's samples: a function that can be asked for any of its positions."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
from numpy.typing import NDArray

_BLOCK = 4096  # positions computed at once: what numpy takes for a call is then a small part of the whole

Order = Callable[[NDArray[np.int64]], NDArray[np.integer]]
"""Takes positions from 0 to size - 1, and returns the indices of the samples there."""


def unshuffled(positions: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the indices at these positions of a dataset's own order."""
    return positions


def drawn(size: int, generator: torch.Generator) -> Order:
    """Return the order that `torch.randperm` draws. **Cost**: 4 bytes a sample (8 from 2^31 samples on)."""
    dtype = torch.int32 if size < 2**31 else torch.int64
    return torch.randperm(size, generator=generator, dtype=dtype).numpy().take


def items_at(order: Order, positions: range, size: int) -> Iterator[int]:
    """Yield the indices at these positions of an order, which begins anew after `size` positions."""
    for first in range(0, len(positions), _BLOCK):
        block = positions[first : first + _BLOCK]
        yield from order(np.arange(block.start, block.stop, block.step) % size).tolist()
