"""Long series of points, made short enough to be drawn."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

Point: TypeAlias = tuple[float, float]

MOST_BUCKETS = 320


@dataclass(frozen=True, slots=True)
class Bucket:
    """Some neighbouring points as one.

    Attributes:
        x: the last of their places.
        mean: of their finite values; None where there are none.
        low: the least of these.
        high: the greatest of these.
        faulty: whether one of their values is not finite.
    """

    x: float
    mean: float | None
    low: float
    high: float
    faulty: bool = False


def buckets(points: Sequence[Point], most: int = MOST_BUCKETS) -> list[Bucket]:
    """Return the points in at most `most` groups of equal size; few points stay single.

    Example:
        >>> [bucket.mean for bucket in buckets([(1, 2.0), (2, 4.0), (3, 9.0)], most=2)]
        [3.0, 9.0]
    """
    size = max(1, math.ceil(len(points) / most))
    return [_bucket(points[begin : begin + size]) for begin in range(0, len(points), size)]


def _bucket(points: Sequence[Point]) -> Bucket:
    values = [value for _, value in points if math.isfinite(value)]
    faulty = len(values) < len(points)
    if not values:
        return Bucket(points[-1][0], None, math.nan, math.nan, faulty)
    return Bucket(points[-1][0], math.fsum(values) / len(values), min(values), max(values), faulty)
