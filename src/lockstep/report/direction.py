"""Whether a metric is better when it is greater, or when it is less, as far as its name tells."""

from __future__ import annotations

import re
from typing import Literal

# Beginnings of words.
_GREATER = ("acc", "auc", "bleu", "dice", "f1", "iou", "map", "miou", "precision", "psnr", "r2", "recall", "top")
_LESS = ("cer", "distance", "err", "fid", "loss", "mae", "mse", "nll", "perplexity", "ppl", "rmse", "wer")
_CASE_CHANGES = re.compile(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")


def direction_of(metric: str) -> Literal["greater", "less"] | None:
    """Return how a metric of that name gets better; None where the name does not tell.

    Example:
        >>> [direction_of(metric) for metric in ("coco/bbox_mAP_50", "top1_error", "PCKAccuracy", "speed")]
        ['greater', 'less', 'greater', None]
    """
    words = _words(metric.lower()) | _words(_CASE_CHANGES.sub(" ", metric).lower())
    if any(word.startswith(_LESS) for word in words):  # first, because of names such as top1_error
        return "less"
    return "greater" if any(word.startswith(_GREATER) or word == "ar" for word in words) else None


def _words(text: str) -> set[str]:
    return set(re.findall(r"[a-z0-9]+", text))
