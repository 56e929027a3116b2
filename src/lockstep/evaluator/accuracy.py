"""Share of samples whose class is predicted right."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from lockstep.evaluator.metric import BaseMetric
from lockstep.registry import METRICS

_LABEL_KEYS = ("labels", "label", "gt_label", "targets", "target", "y")
_SCORE_KEYS = ("scores", "score", "pred_score", "logits", "preds", "pred", "pred_label")


@METRICS.register_module()
class Accuracy(BaseMetric):
    """Share of samples whose class is predicted right, in percent.

    The model's prediction may be a pair (scores or classes, labels), a dict or an object that names both, such as
    one with `.logits`, or the scores alone; the labels may also be the batch's, by name or as its last part.

    **Shapes**: scores [batch, classes], or classes [batch]; labels [batch].
    """

    units: ClassVar[Mapping[str, str]] = {"accuracy": "%"}

    def process(self, data_batch: Any, data_samples: Any) -> None:
        """Append whether each sample of the batch was predicted right."""
        scores, labels = _scores_and_labels(data_batch, data_samples)
        classes = scores.argmax(dim=1) if scores.dim() == labels.dim() + 1 else scores
        if labels.dim() != 1 or classes.shape != labels.shape:
            raise ValueError(
                "scores must have shape [batch, classes] and labels [batch], "
                f"but have {tuple(scores.shape)} and {tuple(labels.shape)}"
            )
        self.results += (classes == labels.to(classes.device)).tolist()

    def compute_metrics(self, results: list[bool]) -> dict[str, float]:
        """Return the share of results that are true."""
        return {"accuracy": 100.0 * sum(results) / len(results)}


def _scores_and_labels(data_batch: Any, data_samples: Any) -> tuple[Tensor, Tensor]:
    scores, labels = data_samples, None
    if isinstance(data_samples, list | tuple):
        if len(data_samples) == 2:
            scores, labels = data_samples
    elif not isinstance(data_samples, Tensor):
        scores, labels = _first(data_samples, _SCORE_KEYS), _first(data_samples, _LABEL_KEYS)
    if labels is None and isinstance(data_batch, Mapping):
        labels = _first(data_batch, _LABEL_KEYS)
    elif labels is None and isinstance(data_batch, list | tuple):
        labels = data_batch[-1]
    if not isinstance(scores, Tensor) or labels is None:
        raise TypeError(
            "Accuracy needs the scores of a batch and its labels, as a pair (scores, labels), a dict with such keys "
            f"or an object with such attributes, but the model predicted {type(data_samples).__name__}"
        )
    return scores, torch.as_tensor(labels)


def _first(values: Any, keys: tuple[str, ...]) -> Any:
    """Return the first of `keys` that a dict, or an object as its attribute, has."""
    if not isinstance(values, Mapping):
        values = {key: getattr(values, key) for key in keys if hasattr(values, key)}
    return next((values[key] for key in keys if key in values), None)
