"""A pipeline: one replica in stages, which process the micro-batches of a batch one after another."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, cat, nn

from lockstep.device import get_device
from lockstep.dist import broadcast_object
from lockstep.errors import ConfigError
from lockstep.model import steps
from lockstep.strategy.colossalai.optim import ColossalAIOptimWrapper
from lockstep.strategy.colossalai.stages import Stages

Criterion = Callable[[Any, Any], Tensor]

# For these models, ColossalAI's policies have been compared with one process; others fail or have not been tested.
MEASURED = (
    "BertForMaskedLM", "BertForSequenceClassification", "BertForTokenClassification", "BloomForCausalLM",
    "FalconForCausalLM", "LlamaForCausalLM", "LlamaForSequenceClassification", "MistralForCausalLM",
    "Qwen2ForCausalLM", "ViTForImageClassification",
)  # fmt: skip
_IGNORED = -100  # the label that HuggingFace's losses ignore
_SHIFTED = ("ForCausalLM", "LMHeadModel")  # classes that predict the next token, so the first label is not scored
_WHOLE = (bool, int, float, str, type(None))


class MicroBatches(NamedTuple):
    """A batch cut into micro-batches.

    Attributes:
        parts: arguments of `forward`, by name.
        sizes: the number of samples in each micro-batch.
    """

    parts: list[dict[str, Any]]
    sizes: list[int]


class Cutting(NamedTuple):
    """How a batch is cut into pieces.

    Attributes:
        number: the number of pieces; None if the size is given.
        size: the maximum number of samples in a piece.
    """

    number: int | None = None
    size: int | None = None

    def sizes(self, samples: int) -> list[int]:
        """Return the number of samples in each piece: as even as possible, and at least one.

        >>> Cutting(number=4).sizes(10), Cutting(number=4).sizes(3), Cutting(size=4).sizes(10)
        ([3, 3, 2, 2], [1, 1, 1], [4, 3, 3])
        """
        wanted = -(-samples // self.size) if self.size else self.number or 1
        pieces = min(wanted, samples)
        return [samples // pieces + (index < samples % pieces) for index in range(pieces)]


@dataclass(frozen=True, eq=False, slots=True)
class Pipeline:
    """The stages that compute on one batch together, as one of them sees it.

    Args:
        execute: runs ColossalAI's schedule: takes micro-batches, a criterion, and the optimizer (None for predictions).
        no_sync: returns the context in which a schedule does not average gradients.
        engine: ColossalAI's optimizer.
        core: this stage's part of the user's own module.
        stages: the stages of the pipeline.
        cutting: how a batch is cut into micro-batches.
    """

    execute: Callable[[list[dict[str, Any]], Criterion, Any], None]
    no_sync: Callable[[], AbstractContextManager[Any]]
    engine: Any
    core: nn.Module
    stages: Stages
    cutting: Cutting

    def train(self, model: nn.Module, data: Any, optim_wrapper: ColossalAIOptimWrapper) -> dict[str, Tensor]:
        """Train on this replica's batch, and return its values to log, which are means over its samples.

        Args:
            model: the wrapper, for its `no_sync`.
            data: the batch, the same on every rank of the replica.
            optim_wrapper: clips and updates.

        **Collective**: every rank of the pipeline; at the end of a window, every rank of the job.
        """
        batches = self._cut(data, "loss", training=True)
        parse = getattr(self.core, "parse_losses", steps.parse_losses)
        means: dict[str, Tensor] = {}

        def run(factor: float) -> None:
            weights = iter(weights_of(self.core, batches) if self.stages.stage == self.stages.last else ())

            def criterion(outputs: Any, _: Any) -> Tensor:
                weight = next(weights)
                if weight == 0:  # no label in it counts, and the mean over no labels is NaN
                    return _zero(outputs)
                loss, log_vars = parse(outputs)
                for name, value in log_vars.items():
                    means[name] = means[name] + value * weight if name in means else value * weight
                # The schedule divides by the number of micro-batches, as if they were equal.
                return loss * (weight * len(batches.parts) * factor)

            with self._own_randomness():
                self.execute(batches.parts, criterion, self.engine)

        optim_wrapper.update_by(model, run)
        return broadcast_object(means, src=self.stages.last, group=self.stages.group)

    def predict(self, data: Any) -> Any:
        """Return the model's predictions for this replica's batch, on each of its ranks.

        **Collective**: every rank of the pipeline.
        """
        batches = self._cut(data, "predict", training=False)
        outputs: list[Any] = []

        def criterion(output: Any, _: Any) -> Tensor:
            outputs.append(output)
            return torch.zeros(())

        with torch.no_grad(), self._own_randomness(), self.no_sync():
            self.execute(batches.parts, criterion, None)
        whole = merged(outputs, weights_of(self.core, batches), batches.sizes) if outputs else None
        return broadcast_object(whole, src=self.stages.last, group=self.stages.group)

    def _cut(self, data: Any, mode: steps.Mode, *, training: bool) -> MicroBatches:
        batch = steps.preprocess(self.core, data, training=training)
        return cut(by_name(type(self.core).forward, batch, mode), self.cutting)

    @contextmanager
    def _own_randomness(self) -> Iterator[None]:
        """Let the stage draw its own random numbers; the generators of the replica stay equal on all its ranks."""
        seed = int(torch.randint(2**62, ()))
        device = get_device()
        devices = [] if device == "cpu" else [torch.get_device_module(device).current_device()]
        with torch.random.fork_rng(devices, device_type="cuda" if device == "cpu" else device):
            torch.manual_seed(seed + self.stages.stage)
            yield


def check_model(model: nn.Module, *, has_policy: bool, has_custom_policy: bool) -> None:
    """Refuse a model that cannot be cut into stages, or that has its own steps.

    Raises:
        ConfigError: the model is of either kind.
    """
    name = type(model).__name__
    if not has_custom_policy and not (has_policy and name in MEASURED):
        raise ConfigError(
            f"the model must be one of {', '.join(MEASURED)} of HuggingFace's with `pp_size` above 1, or come "
            f"with a `custom_policy` that says how it is cut into stages, but is a {name}. Use tp_size, or "
            "strategy='fsdp'"
        )
    for step in ("train_step", "val_step", "test_step"):
        if steps.defines_step(model, step):
            raise ConfigError(
                f"the model must leave `{step}` to lockstep with `pp_size` above 1, because no stage has all of the "
                f"model, but {name} has one of its own, or is trained by a Session. Move what it does into `forward` "
                "and use a Runner, or use strategy='fsdp'"
            )


def _zero(outputs: Any) -> Tensor:
    """Return a loss of 0 with gradients of 0 for everything that the outputs depend on."""
    values = outputs.values() if hasattr(outputs, "values") else [outputs]
    tensors = [value for value in values if isinstance(value, Tensor) and value.requires_grad]
    return max(tensors, key=Tensor.dim).sum() * 0  # prefers scores to the loss


def by_name(forward: Callable[..., Any], batch: Any, mode: str) -> dict[str, Any]:
    """Return a batch as keyword arguments of a module's `forward`, with `mode` if `forward` has it.

    Raises:
        ConfigError: `forward` has fewer arguments than the batch has parts.
    """
    names = list(inspect.signature(forward).parameters)[1:]
    if isinstance(batch, Mapping):
        named = dict(batch)
    else:
        values = list(batch) if isinstance(batch, list | tuple) else [batch]
        if len(values) > len(names):
            raise ConfigError(
                f"`forward` must name an argument for each part of a batch in a pipeline, but names {names}, and there "
                f"are {len(values)} parts"
            )
        named = dict(zip(names, values, strict=False))
    return {**named, "mode": mode} if "mode" in names else named


def cut(batch: Mapping[str, Any], cutting: Cutting) -> MicroBatches:
    """Cut a batch along the first dim of its tensors.

    Lists and tuples are also cut; tensors without dims, numbers, strings and None are copied to each piece.

    Raises:
        ConfigError: a part of it cannot be cut like this.
    """
    lengths = [value.size(0) for value in batch.values() if isinstance(value, Tensor) and value.dim()]
    if not lengths or not lengths[0]:
        raise ConfigError(f"a batch must hold samples to be cut into micro-batches, but holds {_described(batch)}")
    sizes = cutting.sizes(lengths[0])
    stops = list(accumulate(sizes))
    pieces = {name: _cut_value(name, value, sizes, stops) for name, value in batch.items()}
    return MicroBatches([{name: pieces[name][index] for name in batch} for index in range(len(sizes))], sizes)


def weights_of(core: nn.Module, cut_up: MicroBatches) -> list[float]:
    """Return the share of each piece in the mean over the batch; they add up to 1.

    It is the piece's share of the samples. If the batch has integer `labels`, it is the piece's share of the labels
    other than -100, because HuggingFace's models take the mean over those. Models that predict the next token do not
    score the first label.
    """
    counts = [float(size) for size in cut_up.sizes]
    labels = [label for part in cut_up.parts if isinstance(label := part.get("labels"), Tensor)]
    if labels and not labels[0].is_floating_point():
        shift = type(core).__name__.endswith(_SHIFTED) and labels[0].dim() > 1
        scored = [float((label[:, 1:] if shift else label).ne(_IGNORED).sum()) for label in labels]
        counts = scored if sum(scored) else counts
    return [count / sum(counts) for count in counts]


def merged(outputs: Sequence[Any], weights: Sequence[float], sizes: Sequence[int]) -> Any:
    """Merge a model's predictions for the pieces of a batch into its prediction for the whole batch.

    Tensors are concatenated; tensors without dims become their mean weighted by `weights`. Mappings and tuples keep
    their structure, and lists, which hold one entry per sample, are joined.

    Raises:
        ConfigError: a part of them cannot be merged like this.
    """
    first = outputs[0]
    if first is None:
        return None
    if isinstance(first, Tensor) and first.dim() == 0:
        kept = [(output, weight) for output, weight in zip(outputs, weights, strict=True) if weight]
        return sum((output * weight for output, weight in kept[1:]), start=kept[0][0] * kept[0][1])
    if isinstance(first, Mapping):
        entries = {name: merged([output[name] for output in outputs], weights, sizes) for name in first}
        return entries if type(first) is dict else type(first)(**entries)
    if isinstance(first, tuple):
        parts = [merged(values, weights, sizes) for values in zip(*outputs, strict=True)]
        return type(first)(*parts) if hasattr(first, "_fields") else tuple(parts)
    if isinstance(first, Tensor | list) and [len(output) for output in outputs] == list(sizes):
        return cat(list(outputs)) if isinstance(first, Tensor) else list(chain(*outputs))
    raise ConfigError(
        "what a model predicts in a pipeline must be tensors or lists with one entry per sample, scalars or None, or "
        f"dicts and tuples of these, but {_described(first)} came for {sizes[0]} samples. Return such, or use "
        "strategy='fsdp'"
    )


def _cut_value(name: str, value: Any, sizes: list[int], stops: list[int]) -> Sequence[Any]:
    if isinstance(value, _WHOLE) or (isinstance(value, Tensor) and value.dim() == 0):
        return [value] * len(sizes)
    if isinstance(value, Tensor | list | tuple) and len(value) == stops[-1]:
        return [value[stop - size : stop] for size, stop in zip(sizes, stops, strict=True)]
    raise ConfigError(
        f"each part of a batch must have one entry for each of its {stops[-1]} samples in a pipeline, which cuts it, "
        f"but {name!r} is {_described(value)}. Let the dataset give it per sample, or use strategy='fsdp'"
    )


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    length = f" of length {len(value)}" if hasattr(value, "__len__") else ""
    return f"a {type(value).__name__}{length}"
