"""`Evaluator`: several metrics over one pass through the data.

Metrics of torchmetrics work, too; this module does not import torchmetrics.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lockstep.device import get_device
from lockstep.dist import all_gather, all_gather_object, get_world_size
from lockstep.evaluator.accuracy import has_scores, scores_and_labels
from lockstep.evaluator.metric import BaseMetric, LossMetric, Predictions
from lockstep.model.preprocessor import move_to_device
from lockstep.registry import EVALUATOR, METRICS

_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def is_torchmetrics_metric(item: object) -> bool:
    """Return whether an object is a `Metric` or `MetricCollection` of torchmetrics, or a module with their methods.

    A `MetricTracker` is not: it keeps the values of many evaluations, as records do.
    """
    return (
        isinstance(item, nn.Module)
        and all(callable(getattr(item, name, None)) for name in ("update", "compute", "reset"))
        and "MetricTracker" not in {kind.__name__ for kind in type(item).__mro__}
    )


class TorchmetricsMetric(BaseMetric):
    """A metric of torchmetrics over all ranks.

    Each rank updates its own metric. When the value is computed, each gets the states of all, so a rank may have seen
    no batch at all. The metric is updated with the model's prediction if that is a dict of its arguments, losses beside
    them left out, or a tuple `(predictions, targets)` of other things than tensors, such as lists of texts; otherwise,
    also for a model output of transformers, with the scores and labels that `scores_and_labels` finds.
    The metric itself is changed: it moves to
    the device, and no longer synchronises itself, which hangs or gives wrong values where ranks hold lists of unequal
    lengths.

    Args:
        metric: a `Metric`, whose value gets the name of its class, or a `MetricCollection`.

    **Source**: `torchmetrics.Metric` (torchmetrics 1.9): `add_state` and `distributed_available_fn`.
    """

    def __init__(self, metric: Any) -> None:
        super().__init__()
        self.metric = metric.to(get_device())
        parts: Any = metric.children() if isinstance(metric, nn.ModuleDict) else [metric]  # of a collection
        taken = [one for part in parts for one in inspect.signature(part.update).parameters.values()]
        self._names = {one.name for one in taken}
        self._needed = {one.name for one in taken if one.default is one.empty and one.kind not in _VARIADIC}
        for part in metric.modules():
            if hasattr(part, "distributed_available_fn"):
                part.distributed_available_fn = _is_merged_here

    def process(self, data_batch: Any, data_samples: Any) -> None:
        """Update the metric."""
        # A model output of transformers is a mapping, too, but holds scores as `logits`.
        is_dict = isinstance(data_samples, Mapping) and not hasattr(data_samples, "logits")
        if is_dict and (self._needed <= data_samples.keys() or not has_scores(data_samples)):
            # A loss beside the arguments is for `LossMetric`.
            named = {name: one for name, one in data_samples.items() if name in self._names or "loss" not in name}
            self.metric.update(**move_to_device(named, torch.device(get_device())))
        else:
            is_pair = isinstance(data_samples, tuple) and len(data_samples) == 2
            is_for_it = is_pair and not any(isinstance(part, Tensor | None) for part in data_samples)
            given = data_samples if is_for_it else scores_and_labels(data_batch, data_samples)
            self.metric.update(*move_to_device(given, torch.device(get_device())))

    def evaluate(self, size: int | None) -> dict[str, Any]:
        """Return the metric values over all ranks, and reset the metric. **Collective**: every rank."""
        states = _merge_states(self.metric) if get_world_size() > 1 else []
        try:
            computed = self.metric.compute()
        finally:
            for state in states:  # `reset` expects a list where `add_state` was given one
                setattr(state.part, state.name, state.own)
        self.metric.reset()
        return dict(_flattened(type(self.metric).__name__, computed))

    def compute_metrics(self, results: list[Any]) -> dict[str, Any]:
        """Return an empty dict; required by BaseMetric, but not called, because `evaluate` computes the values."""
        return {}


def _is_merged_here() -> bool:
    """Tell a metric of torchmetrics that it has no ranks to add up."""
    return False


class _State(NamedTuple):
    """A state of a metric of torchmetrics, as `add_state` was told.

    Attributes:
        part: the metric that has it, maybe within a collection.
        name: its name there.
        reduce: puts the states of all ranks together.
        own: that of this rank alone.
    """

    part: nn.Module
    name: str
    reduce: Callable[[Any], Any] | None
    own: Any

    @property
    def is_concatenated(self) -> bool:
        return isinstance(self.own, list) and getattr(self.reduce, "__name__", "") == "dim_zero_cat"


def _merge_states(metric: nn.Module) -> list[_State]:
    """Give each part of a metric of torchmetrics the states of all ranks, and return those of this one.

    **Collective**: every rank. **Cost**: for each state that is a list to be concatenated one gather on the device; for
    all others together one of objects.
    """
    states = [
        _State(part, name, reduce, getattr(part, name))
        for part in metric.modules()
        # torchmetrics has no public name for what `add_state` was told (1.9).
        for name, reduce in getattr(part, "_reductions", {}).items()
    ]
    gathered = all_gather_object([None if state.is_concatenated else state.own for state in states])
    device = torch.device(get_device())
    for state, *values in zip(states, *gathered, strict=True):
        merged: Any
        if state.is_concatenated:
            found = all_gather(state.reduce(state.own) if state.own else torch.empty(0, device=device))
            merged = [one for one in found if one.numel()] or found[:1]  # empty ones may have another dtype
        elif isinstance(state.own, list):
            merged = [move_to_device(item, device) for value in values for item in value]
        else:
            merged = torch.stack(move_to_device(values, device))
        setattr(state.part, state.name, state.reduce(merged) if state.reduce and len(merged) else merged)
    return states


def _flattened(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from _flattened(str(key), part)
    else:
        yield name, value


@EVALUATOR.register_module()
class Evaluator:
    """Several metrics over the same predictions.

    Args:
        metrics: a metric (of lockstep or of torchmetrics), the config of one or its `type`, or several of them.
    """

    def __init__(self, metrics: BaseMetric | Mapping[str, Any] | str | Sequence[Any]) -> None:
        items = metrics if isinstance(metrics, list | tuple) else [metrics]
        self.metrics: list[BaseMetric] = []
        for item in items:
            item = {"type": item} if isinstance(item, str) else item
            metric = METRICS.build(item) if isinstance(item, Mapping) else item
            if is_torchmetrics_metric(metric):
                metric = TorchmetricsMetric(metric)
            if not isinstance(metric, BaseMetric):
                raise TypeError(
                    "an evaluator must be a BaseMetric, a metric of torchmetrics, a config dict or a list of these, "
                    f"but has {metric!r} of type {type(metric).__name__}. A metric of your own is a subclass of "
                    "BaseMetric with `process` and `compute_metrics`"
                )
            self.metrics.append(metric)
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

    @property
    def value_names(self) -> list[str] | None:
        """The names that the values will have; None if a metric can't tell before it has computed them."""
        found: list[str] = []
        for metric in self.metrics:
            # A subclass may compute others than its base class says.
            if metric.value_names is None or "value_names" not in vars(type(metric)):
                return None
            found += [name if metric.prefix is None else f"{metric.prefix}/{name}" for name in metric.value_names]
        return found

    def set_dataset_meta(self, meta: dict[str, Any] | None) -> None:
        """Give every metric the dataset's metainfo, such as the names of its classes."""
        for metric in self.metrics:
            metric.dataset_meta = meta

    def reset(self, deals_batches: bool = False) -> None:
        """Begin a pass: forget the results of one that has failed; a pass that is complete leaves none.

        Args:
            deals_batches: whether the ranks take whole batches in turns, not samples.
        """
        for metric in self.metrics:
            metric.results = []
            metric.batch_ends = [] if deals_batches else None
            if isinstance(metric, TorchmetricsMetric):
                metric.metric.reset()

    def begin_batch(self, samples: int, indices: Sequence[int] | None = None) -> None:
        """Say how many samples the next batch has, and which, to metrics that can't tell from the batch itself."""
        for metric in self.metrics:
            if isinstance(metric, LossMetric | Predictions):
                metric.samples, metric.indices = samples, indices

    def process(self, data_samples: Any, data_batch: Any | None = None) -> None:
        """Pass one batch and the model's prediction for it to every metric."""
        for metric in self.metrics:
            try:
                metric.process(data_batch, data_samples)
                if metric.batch_ends is not None:
                    metric.batch_ends.append(len(metric.results))
            except Exception as error:
                own = metric.metric if isinstance(metric, TorchmetricsMetric) else metric
                error.add_note(f"while the metric {type(own).__name__} was given the predictions for a batch")
                raise

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
                    if isinstance(metric, TorchmetricsMetric):
                        kind = type(metric.metric).__name__
                        remedy = "Name them: MetricCollection({'top1': ..., 'top5': ...})"
                    raise ValueError(f"two metrics are called {name!r}, the second one by {kind}. {remedy}")
                merged[name] = plain_value(value)
        return merged


def plain_value(value: Any) -> Any:
    """Return a metric's value as plain Python: a tensor or array of one element as a number, a larger one as lists.

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
    """Return metrics as readable text, for example `accuracy 98.61 %`; values of other types than these are left out.

    Example:
        >>> format_metrics({"accuracy": 98.611, "loss": 0.12345, "by_class": [0.9, 0.8]}, {"accuracy": "%"})
        'accuracy 98.61 %  loss 0.1235'
    """
    shown = {name: value for name, value in metrics.items() if isinstance(value, str | int | float)}
    return "  ".join(f"{name} {_format_value(value, units.get(name))}" for name, value in shown.items())


def _format_value(value: str | float, unit: str | None) -> str:
    if isinstance(value, str):
        return value
    number = f"{value:.4g}" if unit is None or abs(value) >= 1e4 else f"{value:.2f}"
    return number if unit is None else f"{number} {unit}"
