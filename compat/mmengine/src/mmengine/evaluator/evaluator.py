"""`Evaluator`: lockstep's, which gives metrics data elements as dicts, and can evaluate predictions of a file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lockstep.evaluator
from mmengine.registry import EVALUATOR, METRICS
from mmengine.structures import BaseDataElement

__all__ = ["Evaluator"]


@EVALUATOR.register_module()
class Evaluator(lockstep.evaluator.Evaluator):
    """Several metrics over the same predictions.

    Args:
        metrics: a metric, the config of one, or several of them.
    """

    def __init__(self, metrics: Any) -> None:
        items = metrics if isinstance(metrics, list | tuple) else [metrics]
        super().__init__([METRICS.build(one) if isinstance(one, dict) else one for one in items])

    @property
    def dataset_meta(self) -> dict[str, Any] | None:
        """The dataset's metainfo, as the metrics have it."""
        return self.metrics[0].dataset_meta

    @dataset_meta.setter
    def dataset_meta(self, meta: dict[str, Any] | None) -> None:
        self.set_dataset_meta(meta)

    def process(self, data_samples: Any, data_batch: Any | None = None) -> None:
        """Pass one batch and the predictions for it to every metric; data elements as dicts."""
        if isinstance(data_samples, Sequence) and not isinstance(data_samples, str):
            data_samples = [one.to_dict() if isinstance(one, BaseDataElement) else one for one in data_samples]
        super().process(data_samples, data_batch)

    def offline_evaluate(
        self, data_samples: Sequence[Any], data: Sequence[Any] | None = None, chunk_size: int = 1
    ) -> dict[str, Any]:
        """Return the values for predictions that are all there.

        Args:
            data_samples: the predictions.
            data: what was predicted from, as much; or None.
            chunk_size: how many of them are passed to the metrics at a time.
        """
        samples = list(data_samples)
        inputs = None if data is None else list(data)
        if inputs is not None and len(inputs) != len(samples):
            raise AssertionError(
                f"`data_samples` and `data` must be equally many, but are {len(samples)} and {len(inputs)}"
            )
        for begin in range(0, len(samples), chunk_size):
            end = begin + chunk_size
            self.process(samples[begin:end], None if inputs is None else inputs[begin:end])
        return self.evaluate(len(samples))
