"""`Fault`: one error in a config; and checks of one part, ``dict(type=...)``, against the signature of its type.

A value is checked against the annotation of its argument.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from torch import Tensor

from lockstep.config.dictionary import items_below
from lockstep.errors import did_you_mean, error_in_words, lacks_key, nearest
from lockstep.masking import mask_value
from lockstep.registry import CONVERTERS, Registry, in_default_scope
from lockstep.registry.registry import SCOPE
from lockstep.registry.signatures import Arguments

_LONGEST_VALUE = 60
_TAKES: Mapping[type, tuple[type, ...]] = {
    NoneType: (),
    str: (str,),
    bool: (bool, int),
    int: (int,),
    float: (int, float),
    complex: (int, float, complex),
}


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that is wrong with a config.

    Attributes:
        key: the dotted key; numbers index lists.
        says: what is wrong with its value, as the rest of a sentence.
    """

    key: str
    says: str

    def sentence(self, cfg: Mapping[str, Any]) -> str:
        """Return the fault as a sentence, with the value that the key has in `cfg` if that is short."""
        value: Any = cfg
        for part in self.key.split("."):
            if part not in (below := dict(items_below(value))):
                return f"`{self.key}` {self.says}"
            value = below[part]
        shown = repr(mask_value(value, self.key))
        if isinstance(value, Mapping | list | tuple) or len(shown) > _LONGEST_VALUE or shown in self.says:
            return f"`{self.key}` {self.says}"
        return f"`{self.key}` = {shown} {self.says}"


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of config part: what is built from it, and what lockstep adds to it.

    Attributes:
        registry: the registry that builds it.
        default: the type of a part without `type`; None if `type` is required.
        supplied: arguments that lockstep adds if the part does not have them.
        own: keys that lockstep uses itself and does not pass on, and checks elsewhere.
        by_name: whether the name of a type alone may stand for a part.
    """

    registry: Registry
    default: str | None = None
    supplied: frozenset[str] = frozenset()
    own: frozenset[str] = frozenset()
    by_name: bool = False

    def faults(self, key: str, part: object) -> Iterator[Fault]:
        """Yield what is wrong with a part; an object that is already built has no faults."""
        if self.by_name and isinstance(part, str):
            yield from (Fault(key, fault.says) for fault in self.faults(key, {"type": part}))
            return
        if isinstance(part, str | int | float | list | tuple):
            yield Fault(key, f"must be a config dict or a built {self.registry.name}, but is of {type(part).__name__}")
        if isinstance(part, type) and self.registry is not CONVERTERS:  # a class may be a function of a model
            name = part.__name__
            yield Fault(key, f"must be an object or a config dict, but is the class {name}. Give dict(type={name})")
        if not isinstance(part, Mapping):
            return
        if "type" not in part and self.default is None:
            yield Fault(key, lacks_key(part, "type"))
            yield from _nested_faults(key, part, self.registry)
            return
        with in_default_scope(part.get(SCOPE)):
            faults = list(self._faults_here(key, part))
        yield from faults

    def _faults_here(self, key: str, part: Mapping[str, Any]) -> Iterator[Fault]:
        constructor, fault = resolve(part.get("type", self.default), self.registry)
        if fault is not None:
            yield Fault(f"{key}.type", fault)
        given = {name: value for name, value in part.items() if name not in ("type", SCOPE) and name not in self.own}
        if constructor is not None:
            title = f"the {self.registry.name} `{getattr(constructor, '__qualname__', constructor)}`"
            takes = Arguments.of(constructor)
            for name in takes.unknown(given):
                yield Fault(
                    f"{key}.{name}", f"is not an argument of {title}{did_you_mean(name, {*takes.named, *self.own})}"
                )
            for name in takes.missing({*given, *self.supplied}):
                has = sorted(map(str, part))
                yield Fault(key, f"must have the key `{name}`, which {title} needs, but has only {has}")
            yield from value_faults(key, given, takes)
        for name, value in given.items():
            yield from _nested_faults(f"{key}.{name}", value, self.registry)

    def each(self, key: str, parts: object) -> Iterator[Fault]:
        """Yield what is wrong with one part, or with each part of a list."""
        if isinstance(parts, list | tuple):
            for index, part in enumerate(parts):
                yield from self.faults(f"{key}.{index}", part)
        else:
            yield from self.faults(key, parts)


def resolve(kind: object, registry: Registry) -> tuple[Callable[..., Any] | None, str | None]:
    """Return the class or function that a `type` names, and what is wrong with it; one of them is None."""
    if callable(kind):
        return kind, None
    if not isinstance(kind, str):
        return None, "must be a name, a class or a function"
    try:
        found = registry.get(kind)
    except Exception as error:  # raised by a module that the lookup imports, or because it must not be imported
        return None, f"cannot be imported: {error_in_words(error)}"
    return found, f"is no {registry.name} {registry.suggest(kind)}" if found is None else None


def _nested_faults(key: str, value: object, registry: Registry) -> Iterator[Fault]:
    """Yield what is certainly wrong in nested values.

    The object that receives a nested dict may add or remove arguments before it builds something from the dict. So
    missing arguments and unknown types are not faults here, and an unknown key is one only if it is similar to an
    argument that is not given.
    """
    with in_default_scope(value.get(SCOPE) if isinstance(value, Mapping) else None):
        faults = [*_nested_faults_in_scope(key, value, registry)]
    yield from faults


def _nested_faults_in_scope(key: str, value: object, registry: Registry) -> Iterator[Fault]:
    if isinstance(value, Mapping) and (constructor := resolve(value.get("type"), registry)[0]) is not None:
        takes = Arguments.of(constructor)
        given = {name: item for name, item in value.items() if name not in ("type", SCOPE)}
        for name in takes.unknown(given):
            if (meant := nearest(name, takes.named.keys() - given)) is not None:
                title = getattr(constructor, "__qualname__", constructor)
                yield Fault(f"{key}.{name}", f"is not an argument of `{title}`: did you mean `{meant}`?")
        yield from value_faults(key, given, takes)
    for name, item in items_below(value):
        yield from _nested_faults(f"{key}.{name}", item, registry)


def value_faults(key: str, given: Mapping[str, object], takes: Arguments) -> Iterator[Fault]:
    """Yield a fault for each of the `given` arguments whose value its annotation rules out."""
    for name, value in given.items():
        if name in takes.named and (says := annotation_fault(value, takes.named[name])) is not None:
            yield Fault(f"{key}.{name}", says)


def annotation_fault(value: object, parameter: inspect.Parameter) -> str | None:
    """Return what is wrong with a value as the rest of a sentence, or None.

    Only numbers, strings, lists, tuples and dicts are checked, and only values that the annotation rules out for
    certain are faults: a dict may be the config of an object, and a string its name.
    """
    hint = parameter.annotation
    if hint is inspect.Parameter.empty or isinstance(hint, str) or fits(value, hint):
        return None
    says = f"must be {inspect.formatannotation(hint)}, but is {_described(value)}"
    if isinstance(value, str) and _is_number(value):
        says += ". Write the number without quotes"
        if not value.strip("+-").isdecimal():
            says += "; in YAML it needs a dot and a sign, as in 1.0e-3"
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
