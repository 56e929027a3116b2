"""A custom metric and a custom hook."""

from __future__ import annotations

from collections import Counter
from time import monotonic
from typing import Any

from torch import Tensor

from lockstep.dist import broadcast_object
from lockstep.evaluator import BaseMetric
from lockstep.hooks import Hook
from lockstep.registry import HOOKS, METRICS


@METRICS.register_module()
class WorstClass(BaseMetric):
    """Accuracy, in percent, of the class with the lowest accuracy."""

    units = {"worst_class_accuracy": "%"}

    def process(self, data_batch: Any, data_samples: tuple[Tensor, Tensor]) -> None:
        """Add one result per sample, so that each sample counts once on any number of ranks."""
        scores, labels = data_samples
        self.results += zip(labels.tolist(), (scores.argmax(dim=1) == labels).tolist(), strict=True)

    def compute_metrics(self, results: list[tuple[int, bool]]) -> dict[str, float]:
        """Compute the metric from the results of all ranks. Only rank 0 calls this; the other ranks get its result."""
        seen = Counter(label for label, _ in results)
        right = Counter(label for label, is_right in results if is_right)
        return {"worst_class_accuracy": min(100 * right[label] / seen[label] for label in seen)}


@HOOKS.register_module()
class TimeBudget(Hook):
    """End training, after a last validation, when the time budget is used up.

    Args:
        seconds: the time budget.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._deadline = 0.0

    def before_train(self, runner: Any) -> None:
        self._deadline = monotonic() + self.seconds

    def after_train_epoch(self, runner: Any) -> None:
        """Let rank 0 decide: clocks differ between ranks, and a rank that continued alone would wait forever."""
        if broadcast_object(monotonic() > self._deadline):
            runner.logger.info("the time of %g s is over after epoch %d", self.seconds, runner.epoch + 1)
            runner.train_loop.stop_training = True
