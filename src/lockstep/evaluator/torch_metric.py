"""Adapter for metrics of torchmetrics. That package is not imported here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from lockstep.device import cast_data_device, get_device
from lockstep.dist import all_gather, get_world_size
from lockstep.evaluator.accuracy import scores_and_labels
from lockstep.evaluator.metric import BaseMetric


def is_torch_metric(item: object) -> bool:
    """Return whether an object is a `Metric` or `MetricCollection` of torchmetrics, or a module with their methods."""
    return isinstance(item, nn.Module) and all(
        callable(getattr(item, name, None)) for name in ("update", "compute", "reset")
    )


class TorchMetric(BaseMetric):
    """A metric of torchmetrics over all ranks.

    Each rank updates its own metric. The states are gathered once, when the value is computed, with lockstep's
    collectives, so a rank may have seen no batch at all. The metric is updated with the model's prediction if that is a
    pair `(predictions, targets)` or a dict of arguments; otherwise with the scores and labels that `Accuracy` finds.

    Args:
        metric: a `Metric`, whose value gets the name of its class, or a `MetricCollection`.

    **Source**: `torchmetrics.Metric` (torchmetrics 1.9): `dist_sync_fn` and `distributed_available_fn`.
    """

    def __init__(self, metric: Any) -> None:
        super().__init__()
        self.metric = metric.to(get_device())
        for part in metric.modules():
            if hasattr(part, "dist_sync_fn"):
                part.dist_sync_fn = _gather
                part.distributed_available_fn = lambda: get_world_size() > 1
                part.process_group = None

    def process(self, data_batch: Any, data_samples: Any) -> None:
        """Update the metric."""
        if isinstance(data_samples, Mapping) and not hasattr(data_samples, "logits"):
            self.metric.update(**cast_data_device(dict(data_samples), get_device()))
        else:
            self.metric.update(*cast_data_device(scores_and_labels(data_batch, data_samples), get_device()))

    def evaluate(self, size: int | None) -> dict[str, Any]:
        """Return the metric values over all ranks, and reset the metric. **Collective**: every rank."""
        computed = self.metric.compute()
        self.metric.reset()
        return dict(_named(type(self.metric).__name__, computed))

    def compute_metrics(self, results: list[Any]) -> dict[str, Any]:
        """Return an empty dict: `evaluate` computes the values."""
        return {}


def _gather(state: Tensor, group: Any = None) -> list[Tensor]:
    """Return the states of all ranks that are not empty (if all are, one): empty ones may have another dtype."""
    parts = all_gather(state)
    return [part for part in parts if part.numel()] or parts[:1]


def _named(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from _named(str(key), part)
    else:
        yield name, value
