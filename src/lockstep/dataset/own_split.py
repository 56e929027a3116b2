"""Finding out whether a stream seems to split itself over ranks or workers, without drawing from it."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lockstep.dataset.rank_aware import RANK_WORDS, attributes_of, digest, has_number, is_plain, words_in
from lockstep.dist import all_gather_object

_ATTRIBUTES = ("rank", "world_size", "num_replicas", "process_index")
_WORKER_WORDS = frozenset({"get_worker_info"})
# Packages whose code is not searched; the names of their functions in a user's code are.
_FOREIGN = frozenset({
    *sys.stdlib_module_names, "lockstep", "torch", "torchvision", "numpy", "PIL", "pyarrow", "pandas", "transformers",
    "tokenizers",
})  # fmt: skip
_MOST_SEARCHED = 20_000  # objects
_LEAVES = (nn.Module, Tensor, np.ndarray, str, bytes, int, float)
_BEFORE_ITERATION = ("__init__", "__new__", "__init_subclass__", "__set_name__")


def asks_for_rank(dataset: Any) -> bool:
    """Return whether an iterable dataset knows of ranks.

    It does if it, or what it holds, has an attribute such as `rank`, or if the code that an iteration can reach in its
    package asks for the rank.
    """
    return _Search(RANK_WORDS, _ATTRIBUTES).finds(dataset)


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
    told = all_gather_object(own)
    return sorted(name for name, value in own.items() if any(other.get(name, value) != value for other in told))


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
