"""Whether a sampler, a loader or a stream splits the data itself over ranks or workers, without drawing from it."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain
from pathlib import PurePath
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Sampler, Subset, TensorDataset

from lockstep.dist.agreement import differing

_ATTRIBUTES = ("rank", "world_size", "num_replicas", "shard", "process_index", "num_processes")
_MOST_COMPARED = 1000  # indices
# Functions that return a rank, and variables of launchers that hold one.
_RANK_WORDS = frozenset({
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
    return any(
        has_number(part, _ATTRIBUTES)
        or _uses(part, _RANK_WORDS)
        or any(_uses(method, _RANK_WORDS) for _, method in _methods_of(type(part)))
        for part in parts_of(sampler)
    )


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
    plain values in samplers, the first and last items of a `TensorDataset`, a list, a tensor or an array, and how long
    files are.

    **Collective**: every rank. **Cost**: one all_gather of a few hundred bytes.
    """
    if isinstance(sampler, list | tuple | range):
        return _differing({**_of_data(dataset), "the sampler": digest(sampler)})
    return _differing({**_of_data(dataset), **_plain_values(parts_of(sampler), left_out=("data_source", "dataset"))})


def differing_attributes(dataset: Any) -> list[str]:
    """Return the names of the plain attributes of an iterable dataset, and of what it holds, that differ between ranks.

    **Collective**: every rank. **Cost**: one all_gather of some hundred bytes.
    """
    own = (part for part in _reached_from(dataset) if not _is_foreign(type(part)))
    return _differing(_plain_values(own, texts=True))


def asks_for_rank(dataset: Any) -> bool:
    """Return whether an iterable dataset knows of ranks.

    It does if it, or what it holds, has an attribute such as `rank`, or if code by which it may iterate asks for the
    rank.
    """
    return any(
        (has_number(part, _STREAM_ATTRIBUTES) and not isinstance(part, type)) or _uses(part, _RANK_WORDS)
        for part in _reached_from(dataset)
    )


def asks_for_worker(dataset: Any) -> bool:
    """Return whether code by which a dataset may iterate asks for its worker, by `get_worker_info`."""
    return any(_uses(part, _WORKER_WORDS) for part in _reached_from(dataset))


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


def _uses(part: Any, words: frozenset[str]) -> bool:
    """Return whether a function, or a generator, has one of these names, or uses one in its code."""
    code = getattr(part, "__code__", None) or getattr(part, "gi_code", None)
    if not isinstance(code, CodeType):
        return False
    return part.__name__ in words or (not _is_foreign(part) and not words.isdisjoint(_words_in(code)))


def _words_in(code: CodeType) -> Iterator[str]:
    """Yield the names that code uses, and its strings."""
    yield from code.co_names
    stack = list(code.co_consts)
    while stack:
        constant = stack.pop()
        if isinstance(constant, CodeType):
            yield from _words_in(constant)
        elif isinstance(constant, tuple | frozenset):
            stack.extend(constant)
        elif isinstance(constant, str):
            yield constant


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
        found["the indices of the Subset"] = digest(dataset.indices)
        found.update(_of_data(dataset.dataset))
    if is_plain(lengths := getattr(dataset, "lengths", None)):
        found["the `lengths` of the dataset"] = digest(lengths)
    # Of a TensorDataset its tensors: items of a subclass may be drawn at random.
    held = dataset.tensors if isinstance(dataset, TensorDataset) else (dataset,)
    is_held = isinstance(held[0], Tensor | np.ndarray | list | tuple) and len(held[0])
    if is_held and is_plain(ends := [each[index] for each in held for index in (0, -1)]):
        found[f"the first and last items of the {type(dataset).__name__}"] = digest(ends)
    return found


def _plain_values(parts: Iterable[Any], texts: bool = False, left_out: Sequence[str] = ()) -> dict[str, list[str]]:
    """Return digests of the plain attributes of objects, by class and name."""
    found: dict[str, list[str]] = {}
    for part in parts:
        for name, value in attributes_of(part).items():
            if name not in left_out and is_plain(value, texts):
                found.setdefault(f"{type(part).__name__}.{name}", []).append(digest(value))
    return found


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
        value = sorted(value.items(), key=lambda item: repr(item[0]))
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


def _reached_from(dataset: Any) -> Iterator[Any]:
    """Yield a dataset, and the objects, functions and classes that its iteration may use, each once.

    Methods count once some code has named them; special methods, other than those that make an object, at once.
    """
    seen: set[int] = set()
    used: set[str] = set()
    unused: dict[str, list[FunctionType]] = {}
    stack = [dataset]
    while stack and len(seen) < _MOST_SEARCHED:
        part = stack.pop()
        if id(part) in seen or isinstance(part, _LEAVES):
            continue
        seen.add(id(part))
        yield part
        stack.extend(_held_by(part))
        if isinstance(part, FunctionType):
            words = set() if _is_foreign(part) else set(_words_in(part.__code__))
            stack.extend(_named_in(part, words))
            for word in words - used:
                stack.extend(unused.pop(word, ()))
            used |= words
            continue
        for name, method in _methods_of(part) if isinstance(part, type) else _methods_of(type(part), _BEFORE_ITERATION):
            if name in used or (name.startswith("__") and name.endswith("__")):
                stack.append(method)
            else:
                unused.setdefault(name, []).append(method)


def _held_by(part: Any) -> Iterator[Any]:
    """Yield what an object, a function or a container holds; of a container of plain values, nothing."""
    if isinstance(part, Mapping | list | tuple | set | frozenset):
        values = part.values() if isinstance(part, Mapping) else part
        if not isinstance(next(iter(values), None), _LEAVES):
            yield from values
    elif isinstance(part, FunctionType):
        for name, cell in zip(part.__code__.co_freevars, part.__closure__ or (), strict=True):
            with suppress(ValueError):  # it is still empty
                if name != "__class__":
                    yield cell.cell_contents
    elif isinstance(part, MethodType):
        yield from (part.__self__, part.__func__)
    elif isinstance(part, partial):
        yield from (part.func, *part.args, *part.keywords.values())
    elif not isinstance(part, type) and (not _is_foreign(type(part)) or isinstance(part, DataLoader | Dataset)):
        yield from attributes_of(part).values()


def _methods_of(kind: type, left_out: Sequence[str] = ()) -> Iterator[tuple[str, FunctionType]]:
    """Yield the methods and properties of a class, with their names."""
    for one in kind.__mro__:
        for name, value in {} if _is_foreign(one) else vars(one).items():
            function = getattr(value, "fget", None) or getattr(value, "__func__", value)
            if isinstance(function, FunctionType) and name not in left_out:
                yield name, function


def _named_in(function: FunctionType, words: set[str]) -> Iterator[Any]:
    """Yield the functions, and the classes of its own package, that a function names."""
    found = [function.__globals__.get(word) for word in words]
    for module in [one for one in found if isinstance(one, ModuleType) and not _is_foreign(one)]:
        found += [vars(module).get(word) for word in words]
    for one in found:
        if isinstance(one, FunctionType) or (isinstance(one, type) and _package_of(one) == _package_of(function)):
            yield one


def _package_of(item: Any) -> str:
    name = item.__name__ if isinstance(item, ModuleType) else getattr(item, "__module__", "")
    return str(name).partition(".")[0]


def _is_foreign(item: Any) -> bool:
    return _package_of(item) in _FOREIGN
