"""Whether a sampler, a loader or a stream splits the data itself over ranks or workers, without drawing from it."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import PurePath
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Sampler, Subset, TensorDataset

from lockstep.dist import all_gather_object, get_rank, get_world_size

_ATTRIBUTES = ("rank", "world_size", "num_replicas", "shard", "process_index", "num_processes")
_MOST_COMPARED = 1000  # indices
_SEQUENCES = (list, tuple, range, Tensor, np.ndarray)
# Functions that return a rank, and variables of launchers that hold one.
RANK_WORDS = frozenset({
    "get_rank", "get_dist_info", "process_index", "split_by_node",
    "RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK",
})  # fmt: skip
_STREAM_ATTRIBUTES = ("rank", "world_size", "num_replicas", "process_index")
_WORKER_WORDS = frozenset({"get_worker_info"})
# Packages whose code is not searched; the names of their functions in a user's code are.
_FOREIGN = frozenset({
    *sys.stdlib_module_names, "lockstep", "torch", "torchvision", "numpy", "PIL", "pyarrow", "pandas", "transformers",
    "tokenizers",
})  # fmt: skip
_MOST_SEARCHED = 20_000  # objects
_LEAVES = (nn.Module, Tensor, np.ndarray, str, bytes, int, float)
_BEFORE_ITERATION = ("__init__", "__new__", "__init_subclass__", "__set_name__")


def is_rank_aware(sampler: Any) -> bool:
    """Return whether a sampler, batch sampler or loader knows of ranks, that is, gives each rank its own part.

    It does if it, or a sampler or loader that it holds, has one of the attributes `rank`, `world_size`, `num_replicas`,
    `shard`, `process_index` and `num_processes`, with or without a leading underscore, or if a method of its class asks
    for the rank: by `get_rank`, `get_dist_info` or `process_index`, or by a variable such as `RANK`. Nothing is drawn
    from it.

    Example:
        >>> from torch.utils.data import DistributedSampler, RandomSampler
        >>> is_rank_aware(DistributedSampler(range(4), 2, 0)), is_rank_aware(RandomSampler(range(4)))
        (True, False)
    """
    return any(has_number(part, _ATTRIBUTES) or _asks_for_rank(part) for part in parts_of(sampler))


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
        stack.extend(value for name, value in attributes_of(part).items() if _is_inner(name, value))


def differing_parts(dataset: Any, sampler: Any) -> list[str]:
    """Return, in words, what differs between the ranks in a dataset and its sampler. Reads no sample of a `Dataset`.

    It compares lengths, the indices in samplers and in a `Subset`, the weights of a `WeightedRandomSampler`, other
    plain values in samplers, the first and last rows of a `TensorDataset` or a list, and how long files are.

    **Collective**: every rank. **Cost**: one all_gather of a few hundred bytes.
    """
    own = {**_of_data(dataset), **_of_sampler(sampler)}
    gathered = all_gather_object(own)
    names = dict.fromkeys(name for parts in gathered for name in parts)
    return [name for name in names if any(parts.get(name) != own.get(name) for parts in gathered)]


def overlapping_parts(dataset: Any, sampler: Any) -> bool:
    """Return whether ranks have drawn indices of their own from one dataset, of which some are on several ranks.

    So it is after a random split without a common seed; not if each rank has a part of its own. Some of the indices in
    a `Subset` and in a `SubsetRandomSampler` are looked for among those of other ranks.

    **Collective**: every rank. **Cost**: two all_gathers, of up to 8 kB from all ranks together, or 16 indices of each.
    """
    parts = [getattr(part, "indices", ()) for part in (dataset, *parts_of(sampler))]
    own = [part for part in parts if isinstance(part, _SEQUENCES) and len(part) and is_plain(part)]
    every = max(1, sum(map(len, own)) // max(16, _MOST_COMPARED // get_world_size()))
    gathered = all_gather_object([int(index) for part in own for index in part[::every]])
    others = {index for rank, some in enumerate(gathered) if rank != get_rank() for index in some}
    return any(all_gather_object(any(_holds(part, others) for part in own)))


def _holds(indices: Any, some: set[int]) -> bool:
    if isinstance(indices, range):
        return any(index in indices for index in some)
    return bool(np.isin(indices, list(some)).any())


def asks_for_rank(dataset: Any) -> bool:
    """Return whether an iterable dataset knows of ranks.

    It does if it, or what it holds, has an attribute such as `rank`, or if the code that an iteration can reach in its
    package asks for the rank.
    """
    return _Search(RANK_WORDS, _STREAM_ATTRIBUTES).finds(dataset)


def asks_for_worker(dataset: Any) -> bool:
    """Return whether the code that an iteration of a dataset can reach asks for its worker, by `get_worker_info`."""
    return _Search(_WORKER_WORDS).finds(dataset)


def differing_attributes(dataset: Any) -> list[str]:
    """Return the names of the plain attributes of an iterable dataset, and of what it holds, that differ between ranks.

    **Collective**: every rank. **Cost**: one all_gather of some hundred bytes.
    """
    own: dict[str, str] = {}
    stack: list[tuple[str, Any]] = [("", dataset)]
    seen: set[int] = set()
    while stack and len(seen) < _MOST_SEARCHED:
        path, part = stack.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        for name, value in attributes_of(part).items():
            if is_plain(value, texts=True):
                own[f"{path}{name}"] = digest(value)
            elif not isinstance(value, nn.Module | type) and not _is_foreign(type(value)):
                stack.append((f"{path}{name}.", value))
    gathered = all_gather_object(own)
    return sorted(name for name, value in own.items() if any(other.get(name, value) != value for other in gathered))


def _is_inner(name: str, value: Any) -> bool:
    if isinstance(value, Sampler | DataLoader):
        return True
    is_named_so = name.endswith(("sampler", "loader")) and name != "_parent_loader"
    return is_named_so and not isinstance(value, type | str) and hasattr(value, "__iter__")


def attributes_of(part: Any) -> Mapping[str, Any]:
    """Return the attributes that an object itself holds."""
    return getattr(part, "__dict__", {})


def has_number(part: Any, names: tuple[str, ...]) -> bool:
    """Return whether an object has one of these attributes, with or without a leading underscore, not as a method."""
    values = (getattr(part, f"{prefix}{name}", None) for name in names for prefix in ("", "_"))
    return any(value is not None and not callable(value) for value in values)


def _asks_for_rank(part: Any) -> bool:
    functions = [
        getattr(value, "fget", value)
        for kind in type(part).__mro__
        if not kind.__module__.startswith(("torch.", "builtins"))
        for value in vars(kind).values()
    ]
    codes = [getattr(function, "__code__", None) for function in functions]
    codes.append(getattr(part, "gi_code", None))  # for a generator
    return any(RANK_WORDS.intersection(words_in(code)) for code in codes if code is not None)


def words_in(code: CodeType) -> Iterator[str]:
    """Yield the names that code uses, and its strings."""
    yield from code.co_names
    stack = list(code.co_consts)
    while stack:
        constant = stack.pop()
        if isinstance(constant, CodeType):
            yield from words_in(constant)
        elif isinstance(constant, tuple | frozenset):
            stack.extend(constant)
        elif isinstance(constant, str):
            yield constant


def _of_data(dataset: Any) -> dict[str, str]:
    found: dict[str, str] = {}
    with suppress(TypeError):
        found["the length of the dataset"] = str(len(dataset))
    if isinstance(dataset, Subset):
        found["the indices of the Subset"] = digest(dataset.indices)
        found.update(_of_data(dataset.dataset))
    elif isinstance(dataset, TensorDataset) and len(dataset):
        rows = [tensor[index] for tensor in dataset.tensors for index in (0, -1)]
        found["the first and last rows of the TensorDataset"] = digest(rows)
    elif is_plain(lengths := getattr(dataset, "lengths", None)):
        found["the `lengths` of the dataset"] = digest(lengths)
    elif isinstance(dataset, list | tuple) and dataset and is_plain(ends := [dataset[0], dataset[-1]]):
        found["the first and last items"] = digest(ends)
    return found


def _of_sampler(sampler: Any) -> dict[str, str]:
    if isinstance(sampler, list | tuple | range):
        return {"the sampler": digest(sampler)}
    return {
        f"{type(part).__name__}.{name}": digest(value)
        for part in parts_of(sampler)
        for name, value in attributes_of(part).items()
        if name not in ("data_source", "dataset") and is_plain(value)
    }


def is_plain(value: Any, texts: bool = False) -> bool:
    """Return whether a value is a number, a tensor, an array or a container of these; with `texts`, also of strings."""
    if isinstance(value, Mapping):
        return all(is_plain(item, texts) for item in value.values())
    if isinstance(value, list | tuple):
        return not value or is_plain(value[0], texts)
    if texts and isinstance(value, str | PurePath):
        return True
    return isinstance(value, int | float | range | Tensor | np.ndarray | np.generic)


def digest(value: Any) -> str:
    """Return a hash of 16 characters that is the same for equal values in every process."""
    found = hashlib.sha1(usedforsecurity=False)
    for part in _bytes_of(value):
        found.update(part)
    return found.hexdigest()[:16]


def _bytes_of(value: Any) -> Iterator[bytes | memoryview]:
    """Yield what tells a value from others, of a large one part by part."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, Tensor):
        yield repr((value.dtype, tuple(value.shape))).encode()
        if value.layout is torch.strided:
            yield value.detach().cpu().flatten().view(torch.uint8).numpy().data
    elif isinstance(value, np.ndarray | np.generic):
        yield repr((value.dtype.str, value.shape)).encode()
        yield value.tobytes()
    elif isinstance(value, list | tuple) and value and not isinstance(value[0], int | float):
        for item in value:
            yield digest(item).encode()
    elif isinstance(value, list | tuple):
        for first in range(0, len(value), _MOST_COMPARED):
            yield repr(value[first : first + _MOST_COMPARED]).encode()
    else:
        yield repr(value).encode()


class _Search:
    """A search for names in the code that an iteration can reach.

    It follows what objects, functions and containers hold, and functions and classes of the user's packages that their
    code names. Of a class, it searches special methods, and those whose name some code uses.

    Args:
        words: names of functions, and strings, to look for.
        attributes: names of attributes that also count.
    """

    def __init__(self, words: frozenset[str], attributes: tuple[str, ...] = ()) -> None:
        self._words = words
        self._attributes = attributes
        self._used: set[str] = set()
        self._unused: dict[str, list[FunctionType]] = {}  # methods that no code has named yet
        self._stack: list[Any] = []

    def finds(self, item: Any) -> bool:
        """Return whether one of the names is found."""
        seen: set[int] = set()
        self._stack.append(item)
        while self._stack and len(seen) < _MOST_SEARCHED:
            item = self._stack.pop()
            if id(item) in seen or isinstance(item, _LEAVES):
                continue
            seen.add(id(item))
            code = getattr(item, "__code__", None) or getattr(item, "gi_code", None)  # a function's, or a generator's
            if isinstance(code, CodeType):
                words = set(words_in(code))
                words |= _original_names(item, words)
                if not words.isdisjoint(self._words):
                    return True
                self._use(words)
                self._stack.extend(_named_in(item, words))
            elif isinstance(item, type):
                self._add_methods(item, ())
            else:
                if has_number(item, self._attributes):
                    return True
                self._add_methods(type(item), _BEFORE_ITERATION)
            self._stack.extend(_contents(item))
        return False

    def _use(self, words: set[str]) -> None:
        for word in words - self._used:
            self._stack.extend(self._unused.pop(word, ()))
        self._used |= words

    def _add_methods(self, kind: type, left_out: tuple[str, ...]) -> None:
        for one in kind.__mro__:
            for name, value in {} if _is_foreign(one) else vars(one).items():
                function = getattr(value, "fget", None) or getattr(value, "__func__", value)
                if not isinstance(function, FunctionType) or name in left_out:
                    continue
                if name in self._used or (name.startswith("__") and name.endswith("__")):
                    self._stack.append(function)
                else:
                    self._unused.setdefault(name, []).append(function)


def _contents(item: Any) -> Iterator[Any]:
    """Yield what an object, a function or a container holds; of a container of plain values, nothing."""
    if isinstance(item, MethodType):
        yield item.__self__
    elif isinstance(item, FunctionType):
        for name, cell in zip(item.__code__.co_freevars, item.__closure__ or (), strict=True):
            with suppress(ValueError):  # it is still empty
                if name != "__class__":
                    yield cell.cell_contents
    elif isinstance(item, partial):
        yield from (item.func, *item.args, *item.keywords.values())
    elif isinstance(item, Mapping | list | tuple | set | frozenset):
        values = item.values() if isinstance(item, Mapping) else item
        if not isinstance(next(iter(values), None), str | bytes | int | float):
            yield from values
    elif not isinstance(item, type) and (not _is_foreign(type(item)) or isinstance(item, DataLoader | Dataset)):
        yield from attributes_of(item).values()


def _original_names(function: Any, words: set[str]) -> set[str]:
    """Return how functions are called where they are defined, of which a function has imported some by other names."""
    found = [function.__globals__.get(word) for word in words] if isinstance(function, FunctionType) else []
    return {one.__name__ for one in found if isinstance(one, FunctionType)}


def _named_in(function: Any, words: set[str]) -> Iterator[Any]:
    """Yield the functions, and the classes of its own package, that a function names."""
    if not isinstance(function, FunctionType):
        return
    found = [function.__globals__.get(word) for word in words]
    for module in [one for one in found if isinstance(one, ModuleType) and not _is_foreign(one)]:
        found += [vars(module).get(word) for word in words]
    for one in found:
        is_near = isinstance(one, type) and _package_of(one) == _package_of(function)
        if (is_near or isinstance(one, FunctionType)) and not _is_foreign(one):
            yield one


def _package_of(item: Any) -> str:
    return str(item.__name__ if isinstance(item, ModuleType) else item.__module__).partition(".")[0]


def _is_foreign(item: Any) -> bool:
    return _package_of(item) in _FOREIGN
