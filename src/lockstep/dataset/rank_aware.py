"""Whether a sampler or a loader splits the data itself over ranks, and whether ranks have the same data."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import chain
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, Sampler, Subset, TensorDataset

from lockstep.dist.agreement import differing
from lockstep.transport.moving import bytes_of, is_dense_on_host

_ATTRIBUTES = ("rank", "world_size", "num_replicas", "shard", "process_index", "num_processes")
_MOST_COMPARED = 1000  # indices


def is_rank_aware(sampler: Any) -> bool:
    """Return whether a sampler, batch sampler or loader knows of ranks, that is, gives each rank its own part.

    It does if it, or a sampler, loader or dataset of a stream that it holds, has a value in one of the attributes
    `rank`, `world_size`, `num_replicas`, `shard`, `process_index` and `num_processes`, with or without a leading
    underscore. Nothing is drawn from it.

    Example:
        >>> from torch.utils.data import DistributedSampler, RandomSampler
        >>> is_rank_aware(DistributedSampler(range(4), 2, 0)), is_rank_aware(RandomSampler(range(4)))
        (True, False)
    """
    parts = list(parts_of(sampler))
    streams = [part.dataset for part in parts if isinstance(getattr(part, "dataset", None), IterableDataset)]
    return any(_has_number(part) for part in [*parts, *streams])


def parts_of(sampler: Any) -> Iterator[Any]:
    """Yield a sampler or loader, and all samplers and loaders inside it, each once."""
    seen: set[int] = set()
    stack = [sampler]
    while stack:
        part = stack.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        yield part
        stack.extend(value for name, value in _attributes_of(part).items() if _is_inner(name, value))


def differing_parts(dataset: Any, sampler: Any) -> list[str]:
    """Return, in words, what differs between the ranks in a dataset and its sampler. Reads no sample of a `Dataset`.

    It compares lengths, the indices in samplers and in a `Subset`, the weights of a `WeightedRandomSampler`, other
    plain values in samplers, and the first and last items of a `TensorDataset`, a list, a tensor or an array.

    **Collective**: every rank. **Cost**: one all_gather of a few hundred bytes.
    """
    if isinstance(sampler, list | tuple | range):
        return _differing({**_of_data(dataset), "the sampler": _digest(sampler)})
    return _differing({**_of_data(dataset), **_plain_values(sampler)})


def _is_inner(name: str, value: Any) -> bool:
    if isinstance(value, Sampler | DataLoader):
        return True
    is_named_so = name.endswith(("sampler", "loader")) and name != "_parent_loader"
    return is_named_so and not isinstance(value, type | str) and hasattr(value, "__iter__")


def _attributes_of(part: Any) -> Mapping[str, Any]:
    """Return the attributes that an object itself holds."""
    return getattr(part, "__dict__", {})


def _has_number(part: Any) -> bool:
    values = (getattr(part, f"{prefix}{name}", None) for name in _ATTRIBUTES for prefix in ("", "_"))
    return any(value is not None and not callable(value) for value in values)


def _differing(own: Mapping[str, Any]) -> list[str]:
    """Return the names under which some rank has another value than this one, the same names on every rank."""
    gathered = differing(own) or []
    names = dict.fromkeys(chain.from_iterable(gathered))
    return [name for name in names if any(values.get(name) != own.get(name) for values in gathered)]


def _of_data(dataset: Any) -> dict[str, str]:
    found: dict[str, str] = {}
    with suppress(TypeError):
        found["the length of the dataset"] = str(len(dataset))
    if isinstance(dataset, Subset):
        found["the indices of the Subset"] = _digest(dataset.indices)
        found.update(_of_data(dataset.dataset))
    # Of a TensorDataset its tensors: items of a subclass may be drawn at random.
    held = dataset.tensors if isinstance(dataset, TensorDataset) else (dataset,)
    is_held = isinstance(held[0], Tensor | np.ndarray | list | tuple) and len(held[0])
    if is_held and _is_plain(ends := [each[index] for each in held for index in (0, -1)]):
        found[f"the first and last items of the {type(dataset).__name__}"] = _digest(ends)
    return found


def _plain_values(sampler: Any) -> dict[str, list[str]]:
    """Return digests of the plain attributes of a sampler, and of what it holds, by class and name."""
    found: dict[str, list[str]] = {}
    for part in parts_of(sampler):
        for name, value in _attributes_of(part).items():
            if name not in ("data_source", "dataset") and _is_plain(value):
                found.setdefault(f"{type(part).__name__}.{name}", []).append(_digest(value))
    return found


def _is_plain(value: Any) -> bool:
    """Return whether a value is a number, a tensor, an array or a container of these, as its beginning shows."""
    if isinstance(value, Mapping):
        return all(_is_plain(item) for item in value.values())
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value[:_MOST_COMPARED]))
    if isinstance(value, np.ndarray):
        return not value.dtype.hasobject  # in whose place its memory has addresses
    return isinstance(value, int | float | range | Tensor | np.generic)


def _digest(value: Any) -> str:
    """Return a hash of 16 characters that is the same for equal values in every process."""
    found = hashlib.sha1(usedforsecurity=False)
    for part in _bytes_of(value):
        found.update(part)
    return found.hexdigest()[:16]


def _bytes_of(value: Any) -> Iterator[bytes | memoryview]:
    """Yield what tells a value from others, of a large one part by part."""
    if isinstance(value, Mapping):
        value = sorted(value.items(), key=lambda item: repr(item[0]))
    if isinstance(value, Tensor):
        yield repr((value.dtype, tuple(value.shape))).encode()
        if is_dense_on_host(on_host := value.detach().cpu()):
            yield bytes_of(on_host.resolve_conj().resolve_neg().contiguous())
    elif isinstance(value, np.ndarray | np.generic):
        yield repr((value.dtype.str, value.shape)).encode()
        yield value.tobytes()
    elif isinstance(value, list | tuple) and not all(isinstance(item, int | float) for item in value[:_MOST_COMPARED]):
        for item in value:
            yield _digest(item).encode()
    elif isinstance(value, list | tuple):
        for first in range(0, len(value), _MOST_COMPARED):
            yield repr(value[first : first + _MOST_COMPARED]).encode()
    else:
        yield repr(value).encode()
