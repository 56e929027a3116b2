"""The differences between two configs, by dotted keys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from lockstep.config.dictionary import items_below
from lockstep.config.source_form import python_value
from lockstep.masking import MASK, mask_value


@dataclass(frozen=True, slots=True)
class Difference:
    """One key that differs between two configs.

    Attributes:
        kind: how it changed from the first config to the second.
        key: the dotted key; numbers index lists.
        old: its value in the first config as Python source; "" if it was added.
        new: its value in the second config as Python source; "" if it was removed.
    """

    kind: Literal["added", "removed", "changed"]
    key: str
    old: str = ""
    new: str = ""


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[Difference]:
    """Yield the differences, in the order of the first config; additions come at the end of each dict and list.

    Secrets are shown as ``"***"``. One that is masked in one of the configs counts as equal to the other's.

    Example:
        >>> [d.key for d in differences({"a": 1, "b": {"c": [1, 2]}}, {"b": {"c": [1, 3]}, "d": 0})]
        ['a', 'b.c.1', 'd']
    """
    yield from _between(old, new, "")


def _between(old: object, new: object, prefix: str) -> Iterator[Difference]:
    before, after = items_below(old), items_below(new)
    for name, value in before.items():
        key = f"{prefix}{name}"
        if name not in after:
            yield from (Difference("removed", path, old=source) for path, source in _leaves(key, value))
        elif items_below(value) and items_below(after[name]) and _kind(value) is _kind(after[name]):
            yield from _between(value, after[name], f"{key}.")
        elif python_value(value) != python_value(after[name]):
            source, other = (python_value(mask_value(each, key)) for each in (value, after[name]))
            if source != other or MASK not in f"{value}{after[name]}":
                yield Difference("changed", key, source, other)
    for name, value in after.items():
        if name not in before:
            yield from (Difference("added", path, new=source) for path, source in _leaves(f"{prefix}{name}", value))


def _leaves(key: str, value: object) -> Iterator[tuple[str, str]]:
    """Yield the dotted keys of all leaves of a value (its own key if it has no items), with their values as source."""
    items = items_below(value)
    for name, item in items.items():
        yield from _leaves(f"{key}.{name}", item)
    if not items:
        yield key, python_value(mask_value(value, key))


def _kind(value: object) -> type:
    return dict if isinstance(value, Mapping) else type(value)
