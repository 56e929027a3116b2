"""`Accuracy`: the percentage of samples whose class is predicted correctly."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from lockstep.evaluator.metric import BaseMetric
from lockstep.registry import METRICS

_LABEL_KEYS = ("labels", "label", "gt_label", "targets", "target", "y")
_SCORE_KEYS = ("scores", "score", "pred_score", "logits", "preds", "pred", "pred_label")


@METRICS.register_module()
class Accuracy(BaseMetric):
    """The percentage of samples whose class is predicted correctly.

    The model's prediction may be a tuple (scores or classes, labels), a dict or an object that names both, such as one
    with `.logits`; or only the scores, alone or by name. The labels then come from the batch, by name or as its last
    part.

    **Cost**: an accelerator is waited for once, when the results of all batches are read.

    Args:
        topk: a sample counts as correct if its class is among the `topk` highest scores. The result is called
            `accuracy`; with several numbers, `accuracy/top1`, `accuracy/top5` and so on.
        **kwargs: arguments of `BaseMetric`.

    **Shapes**: scores [batch, classes], or, for top 1 only, predicted classes [batch]; labels [batch].

    Example:
        >>> metric = Accuracy(topk=(1, 2))
        >>> metric.process(None, (torch.tensor([[0.6, 0.3, 0.1], [0.2, 0.5, 0.3]]), torch.tensor([0, 2])))
        >>> metric.evaluate(size=2)
        {'accuracy/top1': 50.0, 'accuracy/top2': 100.0}
    """

    def __init__(self, topk: int | Sequence[int] = 1, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        ks = tuple(topk) if isinstance(topk, Iterable) else (topk,)
        self._names = {k: "accuracy" if isinstance(topk, int) else f"accuracy/top{k}" for k in ks}
        if not self._names or not all(type(k) is int and k >= 1 for k in self._names):
            raise ValueError(f"`topk` must be an int of at least 1, or several of them, but is {topk!r}")
        self.units = dict.fromkeys(self._names.values(), "%")

    @property
    def value_names(self) -> Sequence[str]:
        """The names of the values."""
        return tuple(self.units)

    def process(self, data_batch: Any, data_samples: Any) -> None:
        """Append, for each sample of the batch, the place of its class among the best scores, from 0.

        It is the largest of `topk` where the class is not among so many.
        """
        scores, labels = scores_and_labels(data_batch, data_samples)
        if labels.dim() != 1 or scores.shape[:1] != labels.shape or scores.dim() not in (1, 2):
            raise ValueError(
                "scores must have shape [batch, classes] and labels [batch], "
                f"but have {tuple(scores.shape)} and {tuple(labels.shape)}"
            )
        # A blocking copy would wait for all that the device has been given.
        labels = labels.to(scores.device, non_blocking=not scores.is_cpu)
        most = max(self._names)
        if scores.shape[1:] == (1,) or (scores.dim() == 1 and scores.is_floating_point()):
            raise ValueError(
                f"scores must have shape [batch, classes], or be classes [batch], but are {scores.dtype} of shape "
                f"{tuple(scores.shape)}. One score for each sample becomes a class by (score > 0).long()"
            )
        if scores.dim() == 1:
            if most > 1:
                raise ValueError(f"scores must have shape [batch, classes] for the top {most}, but are classes")
            self.results.append(torch.where(scores == labels, 0, 1))
            return
        if most > scores.shape[1]:
            raise ValueError(f"`topk` must be at most {scores.shape[1]}, the number of classes, but is {most}")
        # Among equal scores the first counts as the highest, as for argmax. A NaN counts as higher than all others;
        # of the label itself it is wrong, and so is a label that is no class, such as 0.5.
        classes = torch.arange(scores.shape[1], device=scores.device)
        label = labels.unsqueeze(1)
        known = label.long().clamp(0, scores.shape[1] - 1)
        own = scores.gather(1, known)
        place = (~(scores <= own)).sum(1) + ((scores == own) & (classes < known)).sum(1)
        self.results.append(torch.where((known == label).squeeze(1), place.clamp(max=most), most))

    def evaluate(self, size: int | None) -> dict[str, Any]:
        """Return the percentages over all ranks; see `BaseMetric.evaluate`."""
        if self.batch_ends is not None:  # counted in results of batches
            ends = [0, *accumulate(map(len, self.results))]
            self.batch_ends = [ends[end] for end in self.batch_ends]
        if self.results:
            self.results = torch.cat(self.results).tolist()
        return super().evaluate(size)

    def compute_metrics(self, results: list[int]) -> dict[str, float]:
        """Return the percentage of correct samples for each k."""
        return {name: 100.0 * sum(place < k for place in results) / len(results) for k, name in self._names.items()}


def scores_and_labels(data_batch: Any, data_samples: Any) -> tuple[Tensor, Tensor]:
    """Return the scores and labels of a batch, from the prediction or, for the labels, the batch.

    A list of two is a pair only if its second part can be nothing but labels: it may hold the predictions for two
    samples.
    """
    scores, labels = data_samples, None
    if isinstance(data_samples, list | tuple):
        if len(data_samples) == 2 and (isinstance(data_samples, tuple) or _are_labels(data_samples[1])):
            scores, labels = data_samples
    elif not isinstance(data_samples, Tensor):
        scores, labels = _first(data_samples, _SCORE_KEYS), _first(data_samples, _LABEL_KEYS)
    if labels is None and isinstance(data_batch, Mapping):
        labels = _first(data_batch, _LABEL_KEYS)
    elif labels is None and isinstance(data_batch, list | tuple):
        labels = data_batch[-1]
    if not isinstance(scores, Tensor) or labels is None:
        lacking = f"the model predicted {type(data_samples).__name__}"
        if scores is not None and scores is not data_samples and not isinstance(scores, Tensor):
            lacking = f"the scores that it found are a {type(scores).__name__}, and no tensor"
        if isinstance(scores, Tensor):
            batch = f"has only {', '.join(map(str, data_batch))}" if isinstance(data_batch, Mapping) else "has none"
            lacking = f"no labels are there: neither the prediction has them, nor the batch, which {batch}"
        raise TypeError(
            "the metric needs the scores of a batch and its labels, as a tuple (scores, labels), a dict with such keys "
            f"or an object with such attributes, but {lacking}"
        )
    return scores, torch.as_tensor(labels)


def has_scores(outputs: Mapping[str, Any]) -> bool:
    """Return whether `scores_and_labels` would find scores in a dict."""
    return _first(outputs, _SCORE_KEYS) is not None


def _are_labels(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 1 and not value.is_floating_point()


def _first(values: Any, keys: tuple[str, ...]) -> Any:
    """Return the value of the first of `keys` that a dict has, or an object has as an attribute; None if none."""
    if not isinstance(values, Mapping):
        values = {key: getattr(values, key) for key in keys if hasattr(values, key)}
    return next((values[key] for key in keys if key in values), None)
