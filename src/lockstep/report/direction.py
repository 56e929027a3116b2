"""Whether a metric is better when it is greater, or when it is less, as far as its name tells."""

from __future__ import annotations

import re
from typing import Literal

# Long enough to mean the same wherever they stand in a name, and words that have to stand alone, but for a number.
_LESS = re.compile(r"loss|error|perplexity|distance|\b(cer|err|fid|mae|s?mape|r?mse|nll|ppl|wer)\d*\b")
_GREATER = re.compile(r"acc|auc|bleu|dice|f1|iou|precision|psnr|recall|\b(m?ap|m?ar|r2|top)\d*\b")


def direction_of(metric: str) -> Literal["greater", "less"] | None:
    """Return how a metric of that name gets better; None where the name does not tell.

    Example:
        >>> [direction_of(metric) for metric in ("coco/bbox_mAP_50", "top1_error", "valacc", "fidelity")]
        ['greater', 'less', 'greater', None]
    """
    words = re.sub(r"[^a-z0-9]+", " ", metric.lower())
    if _LESS.search(words):  # first, because of names such as top1_error
        return "less"
    return "greater" if _GREATER.search(words) else None
