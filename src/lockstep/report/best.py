"""Which of several values of a metric is the best, where its name tells."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from lockstep.report.series import Point

_GREATER_IS_BETTER = (
    "acc",
    "auc",
    "precision",
    "recall",
    "f1",
    "map",
    "miou",
    "iou",
    "dice",
    "top",
    "r2",
    "bleu",
    "psnr",
)
_LESS_IS_BETTER = ("loss", "err", "perplexity", "ppl", "mae", "mse", "rmse", "wer", "cer", "nll", "fid", "distance")


def best(name: str, points: Sequence[Point]) -> Point | None:
    """Return the best finite value with its iteration; None where there is none, or the name does not tell.

    Example:
        >>> best("val_loss", [(10, 3.0), (20, 1.0)]), best("speed", [(10, 3.0)])
        ((20, 1.0), None)
    """
    words = [word for word in re.split(r"[^a-z0-9]+", name.lower()) if word]
    if any(word.startswith(_LESS_IS_BETTER) for word in words):
        sign = -1
    elif any(word.startswith(_GREATER_IS_BETTER) for word in words):
        sign = 1
    else:
        return None
    finite = [point for point in points if math.isfinite(point[1])]
    return max(finite, key=lambda point: sign * point[1], default=None)
