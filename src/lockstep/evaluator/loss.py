"""`LossMetric`: the validation loss, if the Runner has a loss."""

from __future__ import annotations

from typing import Any

from lockstep.dataset import batch_size_of
from lockstep.evaluator.metric import BaseMetric
from lockstep.model import OutsideLoss


class LossMetric(BaseMetric):
    """The mean over all samples of the loss that was given to the Runner, as the metric `loss`.

    The loss of each batch is weighted by its number of samples, which is exact if the loss is a mean over samples.

    Args:
        loss: the loss that was attached to the model.
    """

    def __init__(self, loss: OutsideLoss) -> None:
        super().__init__()
        self._loss = loss

    def process(self, data_batch: Any, data_samples: Any) -> None:
        """Append the loss of the batch that was just predicted, and its number of samples."""
        self.results.append((self._loss.predicted, batch_size_of(data_batch)))

    def evaluate(self, size: int | None) -> dict[str, Any]:
        """Return the mean over all ranks; see `BaseMetric.evaluate`."""
        self.results = [(float(loss), samples) for loss, samples in self.results]  # moves them off the accelerator
        return super().evaluate(size)

    def compute_metrics(self, results: list[tuple[float, int]]) -> dict[str, float]:
        """Return the mean, weighted by samples."""
        return {"loss": sum(loss * samples for loss, samples in results) / sum(samples for _, samples in results)}
