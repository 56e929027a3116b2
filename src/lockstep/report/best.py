"""The best value of a metric; whether greater or less is better is inferred from the metric's name."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Literal

from lockstep.report.figures import Point

# Parts long enough to be unambiguous anywhere in a name, and words that must stand alone, except for a number.
_LESS = re.compile(r"loss|error|perplexity|distance|\b(cer|err|fid|mae|s?mape|r?mse|nll|ppl|wer)\d*\b")
_GREATER = re.compile(r"acc|auc|bleu|dice|f1|iou|precision|psnr|recall|\b(m?ap|m?ar|r2|top)\d*\b")


def direction_of(metric: str) -> Literal["greater", "less"] | None:
    """Return whether greater or less is better for a metric with this name; None if the name does not show it.

    Example:
        >>> [direction_of(metric) for metric in ("coco/bbox_mAP_50", "top1_error", "valacc", "fidelity")]
        ['greater', 'less', 'greater', None]
    """
    words = re.sub(r"[^a-z0-9]+", " ", metric.lower())
    if _LESS.search(words):  # checked first, because of names such as top1_error
        return "less"
    return "greater" if _GREATER.search(words) else None


def best(name: str, points: Sequence[Point]) -> Point | None:
    """Return the best finite value with its iteration; None if there is none, or the name does not show which is best.

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
