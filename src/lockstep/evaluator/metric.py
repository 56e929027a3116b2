"""`BaseMetric`: computes one result for all ranks from the results of each rank; the loss as a metric; predictions."""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, pairwise
from math import exp, inf, nan
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as torch_dist
from torch import Tensor

from lockstep.dataset import batch_size_of
from lockstep.device import cast_data_device
from lockstep.dist import all_reduce_tree, barrier, collect_results, get_rank, get_world_size, run_on_main
from lockstep.errors import ConfigError, require_one_of
from lockstep.location import make_folder
from lockstep.logging import read_scalars
from lockstep.model import OutsideLoss, parse_losses
from lockstep.model.compiling import kept_outputs
from lockstep.registry import METRICS
from lockstep.tree import is_tensordict

_LARGEST_EXPONENT = 700.0
_logger = logging.getLogger(__name__)


class BaseMetric(ABC):
    """Base class of metrics over a whole dataset, of which each rank sees a part.

    A subclass appends to `self.results` in `process`, on every rank, and computes the metric values from the results of
    all ranks in `compute_metrics`, on rank 0. Append one result per sample if each sample must count exactly once even
    if a sampler repeats some; the results are then in the order of the loader.

    Args:
        collect_device: accepted for compatibility, `"cpu"` or `"gpu"`: the hosts collect results, whatever it is.
        prefix: put before the names of the values, as in `"val/accuracy"`.
        collect_dir: accepted for compatibility, like `collect_device`; results need no shared disk.

    Attributes:
        default_prefix: the prefix if none is given.
        units: the unit that is shown after a value, by the value's name.
    """

    default_prefix: ClassVar[str | None] = None
    units: Mapping[str, str] = {}
    _may_be_empty: ClassVar[bool] = False  # whether a metric may have nothing to compute
    # How many results there were after each batch of this pass, where ranks take whole batches in turns; else None.
    batch_ends: list[int] | None = None

    def __init__(self, collect_device: str = "cpu", prefix: str | None = None, collect_dir: str | None = None) -> None:
        require_one_of("collect_device", collect_device, ("cpu", "gpu"))
        self.collect_device = collect_device
        self.collect_dir = collect_dir
        self.prefix = prefix or self.default_prefix
        self._dataset_meta: dict[str, Any] | None = None
        self.results: list[Any] = []

    @property
    def value_names(self) -> Sequence[str] | None:
        """The names of the values, if they are known before these are computed; a class attribute can give them.

        A checkpoint by the best value of another name is then refused at once. They are not inherited: a subclass may
        compute others.
        """
        return None

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
            TypeError: on rank 0, `compute_metrics` has not returned a dict, or returned an empty one.
            PeerError: on the other ranks, if that, or `compute_metrics`, failed on rank 0.
        """
        results, self.results = self.results, []
        ends, self.batch_ends = self.batch_ends, None
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
        parts, count = results, size
        if ends is not None:  # what is in turns is the results of a batch
            parts = [results[begin:end] for begin, end in pairwise([0, *ends[:-1], len(results)])]
            count = all_reduce_tree(len(parts))
        collected = collect_results(parts, count) or []
        if ends is not None:
            collected = list(chain.from_iterable(collected))[:size]
        return run_on_main(lambda: self._computed(collected))

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


@METRICS.register_module()
class LossMetric(BaseMetric):
    """The mean of the loss over all samples, as the metric `loss`: the only metric of a validation without others.

    It is the loss that was given to the Runner, or the one that the model itself returns, also in evaluation. The loss
    of each batch is weighted by its number of samples, which is exact if the loss is a mean over samples; or by the
    `batch_size_of` of the training: for a mean over tokens, their number. A batch that counts for nothing is left out,
    whatever its loss is.

    Attributes:
        loss: the loss that was given to the Runner; None for the model's own.
        count: returns what a batch counts for; None for its number of samples.
        samples: number of samples in the next batch; None to take the length of its first part.
        indices: which these are; not used.
    """

    value_names: Sequence[str] | None = ("loss",)

    def __init__(self) -> None:
        super().__init__()
        self.loss: OutsideLoss | None = None
        self.count: Callable[[Any], float] | None = None
        self.samples: int | None = None
        self.indices: Sequence[int] | None = None

    def process(self, data_batch: Any, data_samples: Any) -> None:
        """Append the loss of the batch that was just predicted, and what it counts for."""
        if self.count is not None:
            weight = self.count(data_batch)
        else:
            weight = batch_size_of(data_batch) if self.samples is None else self.samples
        loss = _own_loss(data_samples) if self.loss is None else self.loss.predicted
        self.results.append((kept_outputs(loss), weight))

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


@METRICS.register_module()
class Perplexity(LossMetric):
    """The mean of the loss, as `LossMetric`, and its exponential: `loss` and `perplexity`.

    It is that of a language model if the loss is its cross-entropy alone, as a mean over tokens, and `batch_size_of`
    counts these. With label smoothing or a loss of experts in it, it is larger. A warning names further losses among
    the outputs.
    """

    value_names = ("loss", "perplexity")
    _has_warned = False

    def process(self, data_batch: Any, data_samples: Any) -> None:
        """Append as `LossMetric` does, and warn once of further losses, such as that of a mixture of experts."""
        super().process(data_batch, data_samples)
        names = data_samples if isinstance(data_samples, Mapping) else ()
        losses = [name for name in names if "loss" in name and data_samples[name] is not None]
        if len(losses) > 1 and not self._has_warned and get_rank() == 0:
            self._has_warned = True
            _logger.warning(
                "`perplexity` is the exponential of the whole loss. The model returns %s: where all are part of it, "
                "as in a mixture of experts, that of the predicted tokens is smaller. A metric of the logits gives it: "
                "docs/huggingface.md, metrics of tokens",
                ", ".join(f"`{name}`" for name in losses),
            )

    def compute_metrics(self, results: list[tuple[float, float]]) -> dict[str, float]:
        """Return the weighted mean and its exponential."""
        loss = super().compute_metrics(results)["loss"]
        return {"loss": loss, "perplexity": inf if loss >= _LARGEST_EXPONENT else exp(loss)}


def _own_loss(outputs: Any) -> Tensor:
    """Return the loss in what a model has returned for a batch in evaluation, whatever else is beside it."""
    if isinstance(outputs, Mapping) and not hasattr(outputs, "loss"):
        outputs = {name: value for name, value in outputs.items() if "loss" in name} or outputs
    try:
        return parse_losses(outputs)[0].detach()
    except (TypeError, ValueError) as error:
        raise TypeError(
            "the model must return its loss in evaluation, too, to be validated by it, but has returned a "
            f"{type(outputs).__name__} without one (rank {get_rank()} of {get_world_size()}): {error}. Give metrics of "
            "what it predicts, as in val_evaluator=dict(type='Accuracy')"
        ) from error


class Predictions(BaseMetric):
    """Keeps what the model predicts, sample by sample, in the order of the dataset; computes nothing.

    Args:
        folder: write each sample's prediction to a file of its own there, `INDEX.pt`, instead of keeping it.

    Attributes:
        samples: number of samples in the next batch.
        indices: which these are in the dataset; None if that is not known.
        collected: the predictions of all ranks, on rank 0, once `evaluate` has been called.
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        super().__init__()
        self.folder = None if folder is None else Path(folder).expanduser()
        if self.folder is not None:
            make_folder(self.folder, "out_dir")
        self.samples = 0
        self.indices: Sequence[int] | None = None
        self.collected: list[Any] | None = None
        self._places: list[int] = []

    def process(self, data_batch: Any, data_samples: Any) -> None:
        """Keep the predictions for a batch, in CPU memory."""
        predicted = per_sample(cast_data_device(data_samples, "cpu"), self.samples)
        if self.indices is not None:
            self._places += self.indices
        if self.folder is None:
            self.results += predicted
            return
        if self.indices is None:
            raise ConfigError(
                "`out_dir` must be None for data without indices, such as an iterable dataset, because files are named "
                f"by them (rank {get_rank()} of {get_world_size()})"
            )
        for index, sample in zip(self.indices, predicted, strict=True):
            torch.save(sample, self.folder / f"{index:08}.pt")

    def evaluate(self, size: int | None) -> dict[str, Any]:
        """Collect the predictions on rank 0. **Collective**: every rank."""
        results, places, self.results, self._places = self.results, self._places, [], []
        if self.folder is not None:
            barrier()  # after which all files are there
            return {}
        size, known = all_reduce_tree([len(results), len(places)])
        self.collected = collected = collect_results(results, size)
        order = collect_results(places, known)
        if order and collected is not None:  # what a sampler repeats comes last
            first = dict(zip(reversed(order), reversed(collected), strict=True))
            self.collected = [first[place] for place in sorted(first)]
        return {}

    def compute_metrics(self, results: list[Any]) -> dict[str, Any]:
        """Return an empty dict; required by BaseMetric, but not called."""
        return {}


def per_sample(outputs: Any, size: int) -> list[Any]:
    """Return what a model has returned for a batch, as one value for each of its `size` samples.

    A tensor is split along its first dim, and a tuple or dict part by part. Of a dict, what belongs to no sample, such
    as a loss, is left out; each part of a tuple must belong to samples, because they are known by their places. A list
    has one entry for each sample already.

    Example:
        >>> per_sample({"logits": torch.ones(2, 3), "loss": torch.tensor(1.0)}, size=2)
        [{'logits': tensor([1., 1., 1.])}, {'logits': tensor([1., 1., 1.])}]
        >>> per_sample((torch.tensor([1, 2]), ["a", "b"]), size=2)
        [(tensor(1), 'a'), (tensor(2), 'b')]
    """
    parts = _split(outputs, size)
    if parts is None:
        shape = f" of shape {tuple(outputs.shape)}" if isinstance(outputs, Tensor) else ""
        raise TypeError(
            f"the model must predict something for each of the {size} samples of a batch, but returned a "
            f"{type(outputs).__name__}{shape} (rank {get_rank()} of {get_world_size()}). Let its `forward`, or its "
            "test_step, return a tensor whose first dim is that of the batch, a tuple of these alone, a dict with "
            "some, or a list with one entry for each sample"
        )
    return parts


def _split(outputs: Any, size: int) -> list[Any] | None:
    if isinstance(outputs, Tensor) or is_tensordict(outputs):
        return [row.clone() for row in outputs] if outputs.dim() and len(outputs) == size else None
    if isinstance(outputs, Mapping):
        parts = {key: part for key, value in outputs.items() if (part := _split(value, size)) is not None}
        return [{key: part[index] for key, part in parts.items()} for index in range(size)] if parts else None
    if isinstance(outputs, list):
        return list(outputs) if len(outputs) == size else None
    if isinstance(outputs, tuple) and outputs:
        several = [_split(part, size) for part in outputs]
        return None if None in several else list(zip(*several, strict=True))
    return None
