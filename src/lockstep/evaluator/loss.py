"""The loss of a validation, where the Runner knows it."""

from __future__ import annotations

from typing import Any

from lockstep.dataset import batch_size_of
from lockstep.evaluator.metric import BaseMetric
from lockstep.model import OutsideLoss


class LossMetric(BaseMetric):
    """The mean over all samples of the loss that was given to the Runner, as the metric `loss`.

    The loss of each batch counts by its samples, which is exact for losses that are means over them.

    Args:
        loss: what has been attached to the model.
    """

    def __init__(self, loss: OutsideLoss) -> None:
        super().__init__()
        self._loss = loss

    def process(self, data_batch: Any, data_samples: Any) -> None:
        """Append the loss of the batch that has just been predicted, and its number of samples."""
        self.results.append((self._loss.predicted, batch_size_of(data_batch)))

    def evaluate(self, size: int | None) -> dict[str, Any]:
        """Return the mean over all ranks; see `BaseMetric.evaluate`."""
        self.results = [(float(loss), samples) for loss, samples in self.results]  # not on an accelerator any more
        return super().evaluate(size)

    def compute_metrics(self, results: list[tuple[float, int]]) -> dict[str, float]:
        """Return the mean, weighted by samples."""
        return {"loss": sum(loss * samples for loss, samples in results) / sum(samples for _, samples in results)}
