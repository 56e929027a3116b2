"""A batch in pieces, which follow each other through the stages of a pipeline, and what comes out of them in one."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, chain
from typing import Any, NamedTuple

from torch import Tensor, cat, nn

from lockstep.errors import ConfigError

_IGNORED = -100  # the label that HuggingFace's losses leave out
_SHIFTED = ("ForCausalLM", "LMHeadModel")  # classes that predict the next word, and so score no first label
_WHOLE = (bool, int, float, str, type(None))


class MicroBatches(NamedTuple):
    """A batch in pieces.

    Attributes:
        parts: arguments of `forward`, by name.
        sizes: the number of samples in each.
    """

    parts: list[dict[str, Any]]
    sizes: list[int]


class Cutting(NamedTuple):
    """Into how many pieces a batch is cut.

    Attributes:
        number: as many; None where the size is given.
        size: of at most as many samples.
    """

    number: int | None = None
    size: int | None = None

    def sizes(self, samples: int) -> list[int]:
        """Return the number of samples in each piece: as even as can be, and at least one.

        >>> Cutting(number=4).sizes(10), Cutting(number=4).sizes(3), Cutting(size=4).sizes(10)
        ([3, 3, 2, 2], [1, 1, 1], [4, 3, 3])
        """
        wanted = -(-samples // self.size) if self.size else self.number or 1
        pieces = min(wanted, samples)
        return [samples // pieces + (index < samples % pieces) for index in range(pieces)]


def by_name(forward: Callable[..., Any], batch: Any, mode: str) -> dict[str, Any]:
    """Return a batch as arguments of a module's `forward` by their names, with `mode` where it is one of them.

    Raises:
        ConfigError: it has fewer arguments than the batch has parts.
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
    """Cut a batch, along the first dim of its tensors.

    Lists and tuples are cut, too; tensors without dims, numbers, strings and None go into each piece.

    Raises:
        ConfigError: there is something in it that can't be cut so.
    """
    lengths = [value.size(0) for value in batch.values() if isinstance(value, Tensor) and value.dim()]
    if not lengths or not lengths[0]:
        raise ConfigError(f"a batch must hold samples to be cut into micro-batches, but holds {_described(batch)}")
    sizes = cutting.sizes(lengths[0])
    stops = list(accumulate(sizes))
    pieces = {name: _cut_value(name, value, sizes, stops) for name, value in batch.items()}
    return MicroBatches([{name: pieces[name][index] for name in batch} for index in range(len(sizes))], sizes)


def shares(core: nn.Module, cut_up: MicroBatches) -> list[float]:
    """Return the share of each piece in the mean over the batch; they add up to 1.

    It is the piece's share of the samples; where the batch has `labels` of which some are -100, its share of the
    others, over which HuggingFace's models take the mean. Models that predict the next word score no first label.
    """
    counts = [float(size) for size in cut_up.sizes]
    labels = [label for part in cut_up.parts if isinstance(label := part.get("labels"), Tensor)]
    if labels and not labels[0].is_floating_point():
        shift = type(core).__name__.endswith(_SHIFTED) and labels[0].dim() > 1
        scored = [float((label[:, 1:] if shift else label).ne(_IGNORED).sum()) for label in labels]
        counts = scored if sum(scored) else counts
    return [count / sum(counts) for count in counts]


def merged(outputs: Sequence[Any], weights: Sequence[float], sizes: Sequence[int]) -> Any:
    """Return what a model predicted for the pieces of a batch as what it would predict for the whole.

    Tensors are put one after the other; of those without dims it is the mean by `weights`. Mappings and tuples keep
    their form, and lists, which hold one entry per sample, are joined.

    Raises:
        ConfigError: there is something in it that can't be put together so.
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
        places = [merged(values, weights, sizes) for values in zip(*outputs, strict=True)]
        return type(first)(*places) if hasattr(first, "_fields") else tuple(places)
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
