"""The order of an epoch's samples: a function that can be asked for any of its positions.

A small data set is shuffled by `torch.randperm`, as torch and MMEngine do. The order of a large one is computed,
position by position, in memory that grows with the square root of its size: 1.5 MiB for 10^9 samples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np
import torch
from numpy.typing import NDArray

MOST_DRAWN = 2**23
"""The most samples whose order is drawn: it is held in 32 MiB, and takes 0.2 seconds an epoch."""
_BLOCK = 4096  # positions computed at once: what numpy takes for a call is then a small part of the whole
_ROUNDS = 6  # two are far from random; from three on the tests' statistics find nothing

Order = Callable[[NDArray[np.int64]], NDArray[np.integer]]
"""Takes positions from 0 to size - 1, and returns the indices of the samples there."""


def unshuffled(positions: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the indices at these positions of a dataset's own order."""
    return positions


def drawn_order(size: int, generator: torch.Generator) -> Order:
    """Return the order that `torch.randperm` draws. **Cost**: 4 bytes a sample (8 from 2^31 samples on)."""
    dtype = torch.int32 if size < 2**31 else torch.int64
    return torch.randperm(size, generator=generator, dtype=dtype, device="cpu").numpy().take


def computed_order(size: int, seed: int, epoch: int) -> Order:
    """Return a random order of which any position is computed by itself.

    Think of the samples as lying in a table of about as many rows as columns. A round moves each column down by a
    random number of places, and then each row to the right; what leaves the table at an edge comes back at the other. A
    few rounds shuffle the whole table, and where a sample ends up is known from two numbers a round. (That is a Feistel
    network with random functions.) The last row of the table may have places without a sample: what comes to one is
    moved on until it comes to a sample. (That is cycle walking. It ends, because the rounds are a permutation.)

    Args:
        size: number of samples.
        seed: seed of the order.
        epoch: the epoch. Orders of different seeds and epochs have nothing in common.

    **Cost**: 48 bytes for each row: 1.5 MiB for 10^9 samples.

    Example:
        >>> sorted(computed_order(5, seed=0, epoch=0)(np.arange(5)).tolist())
        [0, 1, 2, 3, 4]
    """
    rows = math.isqrt(max(0, size - 1)) + 1
    columns = -(-size // rows) or 1
    # Raw numbers, because numpy keeps these the same from version to version.
    draw = np.random.PCG64(np.random.SeedSequence(seed % 2**64, spawn_key=(epoch,))).random_raw
    rounds = [
        ((draw(columns) % rows).astype(np.uint32), (draw(rows) % columns).astype(np.uint32)) for _ in range(_ROUNDS)
    ]

    def moved(places: NDArray[np.int64]) -> NDArray[np.int64]:
        row, column = np.divmod(places, columns)
        for down, right in rounds:
            row = (row + down[column]) % rows
            column = (column + right[row]) % columns
        return row * columns + column

    def order(positions: NDArray[np.int64]) -> NDArray[np.int64]:
        places = moved(positions)
        while len(empty := np.flatnonzero(places >= size)):
            places[empty] = moved(places[empty])
        return places

    return order


def items_at(order: Order, positions: range, size: int) -> Iterator[int]:
    """Yield the indices at these positions of an order, which begins anew after `size` positions."""
    for first in range(0, len(positions), _BLOCK):
        block = positions[first : first + _BLOCK]
        yield from order(np.arange(block.start, block.stop, block.step) % size).tolist()
