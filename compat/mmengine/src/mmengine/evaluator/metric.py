"""Metrics: lockstep's base class, and one that writes the predictions to a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

import lockstep.evaluator
from mmengine.fileio import dump
from mmengine.logging import print_log
from mmengine.registry import METRICS
from mmengine.structures import BaseDataElement

__all__ = ["BaseMetric", "DumpResults"]


class BaseMetric(lockstep.evaluator.BaseMetric):
    """Base class of metrics; see `lockstep.evaluator.BaseMetric`. One with nothing to compute returns no values."""

    _may_be_empty = True


@METRICS.register_module()
class DumpResults(BaseMetric):
    """Write the predictions for the whole dataset to a file of pickle.

    Args:
        out_file_path: the file, which ends in .pkl or .pickle.
        collect_device: as for `BaseMetric`.
        collect_dir: as for `BaseMetric`.
    """

    def __init__(self, out_file_path: str, collect_device: str = "cpu", collect_dir: str | None = None) -> None:
        super().__init__(collect_device=collect_device, collect_dir=collect_dir)
        if not out_file_path.endswith((".pkl", ".pickle")):
            raise ValueError(f"`out_file_path` must end in .pkl or .pickle, but is {out_file_path!r}")
        self.out_file_path = out_file_path

    def process(self, data_batch: Any, data_samples: Any) -> None:
        """Keep the predictions of a batch, in CPU memory."""
        self.results.extend(_to_cpu(data_samples))

    def compute_metrics(self, results: list[Any]) -> dict[str, Any]:
        """Write the file; there are no values."""
        dump(results, self.out_file_path)
        print_log(f"the predictions are in {self.out_file_path}", logger="current")
        return {}


def _to_cpu(data: Any) -> Any:
    """Return predictions with their tensors in CPU memory; data elements become dicts."""
    if isinstance(data, BaseDataElement):
        data = data.to_dict()
    if isinstance(data, Tensor):
        return data.detach().to("cpu")
    if isinstance(data, Mapping):
        return {key: _to_cpu(value) for key, value in data.items()}
    if isinstance(data, Sequence) and not isinstance(data, str | bytes):
        return type(data)(_to_cpu(value) for value in data)  # type: ignore[call-arg]
    return data
