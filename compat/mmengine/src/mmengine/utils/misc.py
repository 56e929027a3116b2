"""Types of sequences, calls by name, and names that have changed."""

from __future__ import annotations

import collections.abc
import functools
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from importlib.util import find_spec
from inspect import isclass
from itertools import chain, repeat
from types import ModuleType
from typing import Any, TypeVar

_F = TypeVar("_F", bound=Callable[..., Any])

__all__ = [
    "apply_to",
    "check_prerequisites",
    "concat_list",
    "deprecated_api_warning",
    "deprecated_function",
    "get_object_from_string",
    "has_method",
    "import_modules_from_strings",
    "is_list_of",
    "is_method_overridden",
    "is_seq_of",
    "is_str",
    "is_tuple_of",
    "iter_cast",
    "list_cast",
    "requires_executable",
    "requires_package",
    "slice_list",
    "to_1tuple",
    "to_2tuple",
    "to_3tuple",
    "to_4tuple",
    "to_ntuple",
    "tuple_cast",
]


def to_ntuple(n: int) -> Callable[[Any], tuple[Any, ...]]:
    """Return a function that repeats a single value `n` times; an iterable keeps its own values.

    Example:
        >>> to_ntuple(3)(7), to_ntuple(3)([1, 2, 3])
        ((7, 7, 7), (1, 2, 3))
    """

    def parse(value: Any) -> tuple[Any, ...]:
        return tuple(value) if isinstance(value, Iterable) and not isinstance(value, str) else tuple(repeat(value, n))

    return parse


to_1tuple = to_ntuple(1)
to_2tuple = to_ntuple(2)
to_3tuple = to_ntuple(3)
to_4tuple = to_ntuple(4)


def is_str(x: object) -> bool:
    """Return whether `x` is a str."""
    return isinstance(x, str)


def is_seq_of(seq: Any, expected_type: type | tuple[type, ...], seq_type: Any = None) -> bool:
    """Return whether `seq` is a sequence, or one of `seq_type`, in which everything is of `expected_type`.

    Example:
        >>> is_seq_of([1, 2], int), is_seq_of([1, "a"], int), is_seq_of((1, 2), int, seq_type=list)
        (True, False, False)
    """
    if not isinstance(seq, seq_type or collections.abc.Sequence):
        return False
    items: Iterable[Any] = seq
    return all(isinstance(one, expected_type) for one in items)


def is_list_of(seq: Any, expected_type: type | tuple[type, ...]) -> bool:
    """Return whether `seq` is a list in which everything is of `expected_type`."""
    return is_seq_of(seq, expected_type, list)


def is_tuple_of(seq: Any, expected_type: type | tuple[type, ...]) -> bool:
    """Return whether `seq` is a tuple in which everything is of `expected_type`."""
    return is_seq_of(seq, expected_type, tuple)


def iter_cast(inputs: Iterable[Any], dst_type: type, return_type: type | None = None) -> Any:
    """Convert everything in `inputs` to `dst_type`, and give an iterator, or a `return_type` of it."""
    if not isinstance(inputs, collections.abc.Iterable):
        raise TypeError(f"`inputs` must be an iterable, but is {inputs!r}")
    if not isinstance(dst_type, type):
        raise TypeError(f"`dst_type` must be a type, but is {dst_type!r}")
    found: Iterator[Any] = map(dst_type, inputs)
    return found if return_type is None else return_type(found)


def list_cast(inputs: Iterable[Any], dst_type: type) -> list[Any]:
    """Return a list of `inputs`, each converted to `dst_type`."""
    return list(iter_cast(inputs, dst_type))


def tuple_cast(inputs: Iterable[Any], dst_type: type) -> tuple[Any, ...]:
    """Return a tuple of `inputs`, each converted to `dst_type`."""
    return tuple(iter_cast(inputs, dst_type))


def slice_list(in_list: list[Any], lens: int | list[int]) -> list[list[Any]]:
    """Cut a list into lists of the given lengths, which must add up to its own.

    Example:
        >>> slice_list([1, 2, 3, 4], 2), slice_list([1, 2, 3], [1, 2])
        ([[1, 2], [3, 4]], [[1], [2, 3]])
    """
    if isinstance(lens, int):
        if len(in_list) % lens:
            raise AssertionError(f"`lens` must divide the length of the list, {len(in_list)}, but is {lens}")
        lens = [lens] * (len(in_list) // lens)
    if not isinstance(lens, list):
        raise TypeError(f"`lens` must be an int or a list of int, but is {lens!r}")
    if sum(lens) != len(in_list):
        raise ValueError(f"`lens` must add up to the length of the list, {len(in_list)}, but gives {sum(lens)}")
    rest = iter(in_list)
    return [[next(rest) for _ in range(length)] for length in lens]


def concat_list(in_list: Iterable[Iterable[Any]]) -> list[Any]:
    """Return one list of what all lists hold."""
    return list(chain.from_iterable(in_list))


def apply_to(data: Any, expr: Callable[[Any], bool], apply_func: Callable[[Any], Any]) -> Any:
    """Return `data` with `apply_func` of every value for which `expr` is true; containers keep their types.

    Example:
        >>> apply_to({"a": [1, "x"]}, lambda value: isinstance(value, int), lambda value: value + 1)
        {'a': [2, 'x']}
    """
    if isinstance(data, dict):
        made = {key: apply_to(value, expr, apply_func) for key, value in data.items()}
        return type(data)(made)
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*(apply_to(value, expr, apply_func) for value in data))
    if isinstance(data, tuple | list):
        return type(data)(apply_to(value, expr, apply_func) for value in data)
    return apply_func(data) if expr(data) else data


def import_modules_from_strings(
    imports: str | list[str] | None, allow_failed_imports: bool = False
) -> ModuleType | list[ModuleType | None] | None:
    """Import one module or several by name.

    Args:
        imports: a name, or a list of names.
        allow_failed_imports: warn where a module cannot be imported, and give None for it.

    Returns:
        The module, or a list of modules; None if there is nothing to import.
    """
    if not imports:
        return None
    names = [imports] if isinstance(imports, str) else imports
    if not is_list_of(names, str):
        raise TypeError(f"`imports` must be a str or a list of str, but is {imports!r}")
    modules: list[ModuleType | None] = []
    for name in names:
        try:
            modules.append(import_module(name))
        except ImportError as error:
            if not allow_failed_imports:
                raise ImportError(f"`{name}` cannot be imported: {error}") from error
            warnings.warn(f"`{name}` cannot be imported and is left out: {error}", UserWarning, stacklevel=2)
            modules.append(None)
    return modules[0] if isinstance(imports, str) else modules


def get_object_from_string(obj_name: str) -> Any:
    """Return what an import path names: a module, class, function or attribute; None if there is no such thing."""
    parts = obj_name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found: Any = import_module(".".join(parts[:length]))
        except ImportError:
            continue
        for part in parts[length:]:
            found = getattr(found, part, None)
        return found
    return None


def check_prerequisites(
    prerequisites: str | list[str],
    checker: Callable[[str], bool],
    msg_tmpl: str = "`{1}` needs {0}, which cannot be found. Install it first",
) -> Callable[[_F], _F]:
    """Return a decorator: the function raises RuntimeError where the checker says no to one of the prerequisites."""
    wanted = [prerequisites] if isinstance(prerequisites, str) else prerequisites

    def wrap(func: _F) -> _F:
        @functools.wraps(func)
        def call(*args: Any, **kwargs: Any) -> Any:
            if missing := [one for one in wanted if not checker(one)]:
                message = msg_tmpl.format(", ".join(missing), func.__name__)
                print(message)
                raise RuntimeError(message)
            return func(*args, **kwargs)

        return call  # type: ignore[return-value]

    return wrap


def requires_package(prerequisites: str | list[str]) -> Callable[[_F], _F]:
    """Return a decorator: the function raises RuntimeError where one of these packages is not installed."""
    return check_prerequisites(prerequisites, lambda name: find_spec(name) is not None)


def requires_executable(prerequisites: str | list[str]) -> Callable[[_F], _F]:
    """Return a decorator: the function raises RuntimeError where one of these programs is not on the path."""
    return check_prerequisites(prerequisites, lambda name: shutil.which(name) is not None)


def deprecated_api_warning(name_dict: dict[str, str], cls_name: str | None = None) -> Callable[[_F], _F]:
    """Return a decorator that renames arguments, with a DeprecationWarning.

    Args:
        name_dict: the new name of each old one.
        cls_name: the class of the function, for the message.
    """

    def wrap(func: _F) -> _F:
        title = f"{cls_name}.{func.__name__}" if cls_name else func.__name__

        @functools.wraps(func)
        def call(*args: Any, **kwargs: Any) -> Any:
            for old in [name for name in name_dict if name in kwargs]:
                new = name_dict[old]
                warnings.warn(
                    f"`{title}`: the argument `{old}` is called `{new}` now", DeprecationWarning, stacklevel=2
                )
                if new in kwargs:
                    raise AssertionError(f"`{title}` got `{old}` and `{new}`, which mean the same. Give `{new}` only")
                kwargs[new] = kwargs.pop(old)
            return func(*args, **kwargs)

        return call  # type: ignore[return-value]

    return wrap


def deprecated_function(since: str, removed_in: str, instructions: str) -> Callable[[_F], _F]:
    """Return a decorator that logs, once, that a function is deprecated, and says so in its docstring."""

    def wrap(func: _F) -> _F:
        told = False

        @functools.wraps(func)
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal told
            if not told:
                from mmengine.logging import print_log

                print_log(
                    f"`{func.__module__}.{func.__name__}` is deprecated since {since}, and will be gone in "
                    f"{removed_in}: please {instructions}",
                    logger="current",
                    level=30,
                )
                told = True
            return func(*args, **kwargs)

        notice = f".. deprecated:: {since}\n    It will be gone in {removed_in}: please {instructions}."
        call.__doc__ = f"{notice}\n\n{func.__doc__ or ''}"
        return call  # type: ignore[return-value]

    return wrap


def is_method_overridden(method: str, base_class: type, derived_class: Any) -> bool:
    """Return whether a class, or that of an object, has another method of this name than `base_class`."""
    if not isclass(base_class):
        raise AssertionError(f"`base_class` must be a class, but is {base_class!r}")
    derived = derived_class if isclass(derived_class) else type(derived_class)
    return getattr(derived, method) is not getattr(base_class, method)


def has_method(obj: object, method: str) -> bool:
    """Return whether `obj` has a method of this name."""
    return callable(getattr(obj, method, None))
