"""`BaseMetric`: computes one result for all ranks from the results of each rank; `LossMetric`: the validation loss."""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from math import nan
from typing import Any, ClassVar

import torch.distributed as torch_dist

from lockstep.dataset import batch_size_of
from lockstep.dist import all_reduce_tree, collect_results, get_rank, get_world_size, run_on_main
from lockstep.errors import require_one_of
from lockstep.logging import read_scalars
from lockstep.model import OutsideLoss
from lockstep.model.compiling import kept_outputs

_logger = logging.getLogger(__name__)


class BaseMetric(ABC):
    """Base class of metrics over a whole dataset, of which each rank sees a part.

    A subclass appends to `self.results` in `process`, on every rank, and computes the metric values from the results of
    all ranks in `compute_metrics`, on rank 0. Append one result per sample if each sample must count exactly once even
    if a sampler repeats some; the results are then in the order of the dataset.

    Args:
        collect_device: the device through which results are collected, `"cpu"` or `"gpu"`.
        prefix: put before the names of the values, as in `"val/accuracy"`.
        collect_dir: a folder that all ranks share; large results are collected through it instead of through memory.

    Attributes:
        default_prefix: the prefix if none is given.
        units: the unit that is shown after a value, by the value's name.
    """

    default_prefix: ClassVar[str | None] = None
    units: Mapping[str, str] = {}
    _may_be_empty: ClassVar[bool] = False  # whether a metric may have nothing to compute

    def __init__(self, collect_device: str = "cpu", prefix: str | None = None, collect_dir: str | None = None) -> None:
        require_one_of("collect_device", collect_device, ("cpu", "gpu"))
        self.collect_device = collect_device
        self.collect_dir = collect_dir
        self.prefix = prefix or self.default_prefix
        self._dataset_meta: dict[str, Any] | None = None
        self.results: list[Any] = []

    @property
    def dataset_meta(self) -> dict[str, Any] | None:
        """The `metainfo` of the dataset; None before the evaluation is built. A subclass may override the setter."""
        return self._dataset_meta

    @dataset_meta.setter
    def dataset_meta(self, dataset_meta: dict[str, Any] | None) -> None:
        self._dataset_meta = dataset_meta

    @abstractmethod
    def process(self, data_batch: Any, data_samples: Any) -> None:
        """Append the results of one batch to `self.results`.

        Args:
            data_batch: what the data loader yielded.
            data_samples: what the model's `val_step` returned for it.
        """

    @abstractmethod
    def compute_metrics(self, results: list[Any]) -> dict[str, Any]:
        """Return metric values by name, from the results of all ranks.

        It is called on rank 0 alone, as in one process: collectives of `lockstep.dist` return at once, and so do
        metrics of torchmetrics that are computed here. The other ranks wait for the values.
        """

    def evaluate(self, size: int | None) -> dict[str, Any]:
        """Return the metric values of the whole dataset, and clear the results.

        Args:
            size: number of samples in the dataset; results beyond it are of repeated samples. None if it is not known.

        Returns:
            The same dict on every rank.

        **Collective**: every rank.

        Raises:
            ValueError: `process` has appended nothing on any rank.
            TypeError: `compute_metrics` has not returned a dict, or returned an empty one.
            PeerError: on the other ranks, if `compute_metrics` failed on rank 0.
        """
        results, self.results = self.results, []
        total = all_reduce_tree(len(results))
        if total == 0:
            raise ValueError(
                f"{type(self).__name__}.process() must append to self.results, but has appended "
                f"nothing on any rank, or there were no samples (rank {get_rank()} of {get_world_size()})"
            )
        size = total if size is None else min(size, total)
        if total - size >= get_world_size():
            _logger.warning(
                "%s has %d results for %d samples, more than samplers repeat to give %d ranks "
                "equally many: only the first %d count. Append one result per sample or per batch",
                type(self).__name__, total, size, get_world_size(), size,
            )  # fmt: skip
        collected = collect_results(results, size, device=self.collect_device, tmpdir=self.collect_dir)
        return run_on_main(lambda: self._computed(collected or []))

    def _computed(self, results: list[Any]) -> dict[str, Any]:
        with _as_one_process():
            metrics: Any = self.compute_metrics(results)
        if not isinstance(metrics, Mapping) or not (metrics or self._may_be_empty):
            raise TypeError(
                f"{type(self).__name__}.compute_metrics() must return a dict of numbers by name, "
                f"but returned {metrics!r}"
            )
        if self.prefix is None:
            return dict(metrics)
        return {f"{self.prefix}/{name}": value for name, value in metrics.items()}


@contextmanager
def _as_one_process() -> Iterator[None]:
    """Let code of this thread that asks torch whether there are other ranks find none, so that it waits for nobody.

    **Source**: `jit_distributed_available` (torchmetrics 1.9) asks so before it gathers states.
    """
    found, here = torch_dist.is_initialized, threading.get_ident()
    torch_dist.is_initialized = lambda: threading.get_ident() != here and found()
    try:
        yield
    finally:
        torch_dist.is_initialized = found


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
