"""Which of several values of a metric is the best, where its name tells."""

from __future__ import annotations

import math
from collections.abc import Sequence

from lockstep.report.direction import direction_of
from lockstep.report.series import Point


def best(name: str, points: Sequence[Point]) -> Point | None:
    """Return the best finite value with its iteration; None where there is none, or the name does not tell.

    Example:
        >>> best("val_loss", [(10, 3.0), (20, 1.0)]), best("speed", [(10, 3.0)])
        ((20, 1.0), None)
    """
    direction = direction_of(name)
    if direction is None:
        return None
    sign = 1 if direction == "greater" else -1
    finite = [point for point in points if math.isfinite(point[1])]
    return max(finite, key=lambda point: sign * point[1], default=None)
