"""`LossMetric`: the validation loss, if the Runner has a loss."""

from __future__ import annotations

from collections.abc import Callable
from math import nan
from typing import Any

from lockstep.dataset import batch_size_of
from lockstep.evaluator.metric import BaseMetric
from lockstep.logging import read_scalars
from lockstep.model import OutsideLoss
from lockstep.model.compiling import kept_outputs


class LossMetric(BaseMetric):
    """The mean over all samples of the loss that was given to the Runner, as the metric `loss`.

    The loss of each batch is weighted by its number of samples, which is exact if the loss is a mean over samples; or
    by what `count` returns: for a mean over tokens, their number.

    Args:
        loss: the loss that was attached to the model.
        count: returns what a batch counts for; by default its number of samples. A batch that counts for nothing is
            left out, whatever its loss is.

    Attributes:
        samples: number of samples in the next batch; None to take the length of its first part.
    """

    def __init__(self, loss: OutsideLoss, count: Callable[[Any], int] | None = None) -> None:
        super().__init__()
        self._loss = loss
        self._count = count
        self.samples: int | None = None

    def process(self, data_batch: Any, data_samples: Any) -> None:
        """Append the loss of the batch that was just predicted, and what it counts for."""
        if self._count is not None:
            weight = self._count(data_batch)
        else:
            weight = batch_size_of(data_batch) if self.samples is None else self.samples
        self.results.append((kept_outputs(self._loss.predicted), weight))

    def evaluate(self, size: int | None) -> dict[str, Any]:
        """Return the mean over all ranks; see `BaseMetric.evaluate`."""
        values = read_scalars(value for pair in self.results for value in pair)  # one read of an accelerator
        self.results = list(zip(values[::2], values[1::2], strict=True))
        return super().evaluate(size)

    def compute_metrics(self, results: list[tuple[float, float]]) -> dict[str, float]:
        """Return the weighted mean; NaN if nothing counts."""
        counted = [(loss, weight) for loss, weight in results if weight]
        total = sum(weight for _, weight in counted)
        return {"loss": sum(loss * weight for loss, weight in counted) / total if total else nan}
