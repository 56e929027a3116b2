"""`Evaluator`: several metrics over one pass through the data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from lockstep.evaluator.loss import LossMetric
from lockstep.evaluator.metric import BaseMetric
from lockstep.evaluator.torch_metric import TorchMetric, is_torch_metric
from lockstep.registry import EVALUATOR, METRICS


@EVALUATOR.register_module()
class Evaluator:
    """Several metrics over the same predictions.

    Args:
        metrics: a metric (of lockstep or of torchmetrics), the config of one, or several of them.
    """

    def __init__(self, metrics: BaseMetric | Mapping[str, Any] | Iterable[Any]) -> None:
        items = [metrics] if isinstance(metrics, BaseMetric | Mapping) or is_torch_metric(metrics) else metrics
        self.metrics: list[BaseMetric] = []
        for item in items:
            built = METRICS.build(item) if isinstance(item, Mapping) else item
            metric: Any = TorchMetric(built) if is_torch_metric(built) else built
            self.metrics.append(metric)
            if not isinstance(metric, BaseMetric):
                raise TypeError(
                    "an evaluator must be a BaseMetric, a metric of torchmetrics, a config dict or a list of these, "
                    f"but has {metric!r} of type {type(metric).__name__}"
                )
        if not self.metrics:
            raise ValueError("an evaluator must have at least one metric, but has none")

    @property
    def units(self) -> dict[str, str]:
        """The unit of each metric value, by its name."""
        return {
            name if metric.prefix is None else f"{metric.prefix}/{name}": unit
            for metric in self.metrics
            for name, unit in metric.units.items()
        }

    def set_dataset_meta(self, meta: dict[str, Any] | None) -> None:
        """Give every metric the dataset's metainfo, such as the names of its classes."""
        for metric in self.metrics:
            metric.dataset_meta = meta

    def count_samples(self, samples: int) -> None:
        """Set how many samples the next batch has, for metrics that can't tell from the batch itself."""
        for metric in self.metrics:
            if isinstance(metric, LossMetric):
                metric.samples = samples

    def process(self, data_samples: Any, data_batch: Any | None = None) -> None:
        """Pass one batch and the model's prediction for it to every metric."""
        for metric in self.metrics:
            metric.process(data_batch, data_samples)

    def evaluate(self, size: int | None) -> dict[str, Any]:
        """Return the values of all metrics, the same on every rank.

        Args:
            size: number of samples in the dataset, or None if it is not known.

        **Collective**: every rank.

        Raises:
            ValueError: two metrics use the same name.
        """
        merged: dict[str, Any] = {}
        for metric in self.metrics:
            for name, value in metric.evaluate(size).items():
                if name in merged:
                    kind, remedy = type(metric).__name__, "Give it a `prefix`"
                    if isinstance(metric, TorchMetric):
                        kind = type(metric.metric).__name__
                        remedy = "Name them: MetricCollection({'top1': ..., 'top5': ...})"
                    raise ValueError(f"two metrics are called {name!r}, the second one by {kind}. {remedy}")
                merged[name] = plain_value(value)
        return merged


def plain_value(value: Any) -> Any:
    """Return what a metric has computed without types of torch and numpy: one element as a number, several as lists.

    Example:
        >>> import torch
        >>> plain_value(torch.tensor([0.5])), plain_value((torch.ones(2), 3))
        (0.5, [[1.0, 1.0], 3])
    """
    if isinstance(value, list | tuple):
        return [plain_value(item) for item in value]
    if not hasattr(value, "tolist"):
        return value
    elements = value.reshape(-1).tolist()
    return elements[0] if len(elements) == 1 else value.tolist()


def format_metrics(metrics: Mapping[str, Any], units: Mapping[str, str]) -> str:
    """Return metrics as readable text, for example `accuracy 98.61 %`; lists are left out.

    Example:
        >>> format_metrics({"accuracy": 98.611, "loss": 0.12345, "by_class": [0.9, 0.8]}, {"accuracy": "%"})
        'accuracy 98.61 %  loss 0.1235'
    """
    return "  ".join(
        f"{name} {value}"
        if isinstance(value, str)
        else f"{name} {value:.2f} {units[name]}"
        if name in units
        else f"{name} {value:.4g}"
        for name, value in metrics.items()
        if isinstance(value, str | int | float)
    )
