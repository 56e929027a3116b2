"""What differs between two configs, by dotted keys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from lockstep.config.source_form import python_value


@dataclass(frozen=True, slots=True)
class Difference:
    """One key that is not the same in two configs.

    Attributes:
        kind: what happened to it from the first config to the second.
        key: dotted; numbers index lists.
        old: its value in the first config as Python source, "" where it was added.
        new: its value in the second config, "" where it was removed.
    """

    kind: Literal["added", "removed", "changed"]
    key: str
    old: str = ""
    new: str = ""


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[Difference]:
    """Yield what differs, in the order of the first config, with what was added at the end of each dict and list.

    Example:
        >>> [d.key for d in differences({"a": 1, "b": {"c": [1, 2]}}, {"b": {"c": [1, 3]}, "d": 0})]
        ['a', 'b.c.1', 'd']
    """
    yield from _between(_items(old), _items(new), "")


def _between(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str) -> Iterator[Difference]:
    for name, value in old.items():
        key = f"{prefix}{name}"
        if name not in new:
            yield from (Difference("removed", path, old=source) for path, source in _leaves(key, value))
        elif _is_nested(value) and _is_nested(new[name]) and _kind(value) is _kind(new[name]):
            yield from _between(_items(value), _items(new[name]), f"{key}.")
        elif (before := python_value(value)) != (after := python_value(new[name])):
            yield Difference("changed", key, before, after)
    for name, value in new.items():
        if name not in old:
            yield from (Difference("added", path, new=source) for path, source in _leaves(f"{prefix}{name}", value))


def _leaves(key: str, value: Any) -> Iterator[tuple[str, str]]:
    """Yield the dotted keys below a value, or its own, with their values as source."""
    if _is_nested(value):
        for name, item in _items(value).items():
            yield from _leaves(f"{key}.{name}", item)
    else:
        yield key, python_value(value)


def _items(value: Mapping[str, Any] | Sequence[Any]) -> dict[str, Any]:
    if isinstance(value, Mapping):
        return {str(name): item for name, item in value.items()}
    return {str(index): item for index, item in enumerate(value)}


def _kind(value: Any) -> type:
    return dict if isinstance(value, Mapping) else type(value)


def _is_nested(value: Any) -> bool:
    """Say whether there are keys below a value; an empty dict or list is a value itself."""
    return isinstance(value, Mapping | list | tuple) and len(value) > 0
