"""Checking whether a value in a config fits the annotation of an argument."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from torch import Tensor

_TAKES: Mapping[type, tuple[type, ...]] = {
    NoneType: (),
    str: (str,),
    bool: (bool, int),
    int: (int,),
    float: (int, float),
    complex: (int, float, complex),
}


def misfit(value: object, parameter: inspect.Parameter) -> str | None:
    """Return what is wrong with a value as the rest of a sentence, or None.

    Only numbers, strings, lists, tuples and dicts are checked, and only values that the annotation rules out for
    certain are faults: a dict may be the config of an object, and a string its name.
    """
    hint = parameter.annotation
    if hint is inspect.Parameter.empty or isinstance(hint, str) or fits(value, hint):
        return None
    says = f"must be {inspect.formatannotation(hint)}, but is {_described(value)}"
    if isinstance(value, str) and _is_number(value):
        says += ". Write the number without quotes; in YAML it needs a dot and a sign, as in 1.0e-3"
    return says


def fits(value: object, hint: Any) -> bool:
    """Return False if `hint` rules out the value for certain, otherwise True."""
    if value is None or not isinstance(value, int | float | str | list | tuple | Mapping):
        return True
    origin, members = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return any(fits(value, member) for member in members)
    if origin is Annotated:
        return fits(value, members[0])
    if origin is Literal:
        return value in members
    kind = origin or hint
    if not isinstance(kind, type):
        return True
    if kind in _TAKES:
        whole = kind is int and isinstance(value, float) and value.is_integer()
        return whole or isinstance(value, _TAKES[kind])
    if issubclass(kind, list | tuple | set | frozenset):
        return isinstance(value, list | tuple)
    if issubclass(kind, Mapping):
        return isinstance(value, Mapping)
    return not (issubclass(kind, Tensor) and isinstance(value, str))


def _described(value: object) -> str:
    if isinstance(value, Mapping):
        return "a dict"
    name = type(value).__name__
    return {"str": "text", "int": "an int"}.get(name, f"a {name}")


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
