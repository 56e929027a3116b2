"""`ConfigDict`: a dict whose keys are also attributes, and merging of one into another."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from copy import copy, deepcopy
from typing import Any, Self, TypeAlias

from lockstep.errors import ConfigError, did_you_mean

DELETE = "_delete_"
# Makes an error from a dotted key and what is wrong with it.
MakeError: TypeAlias = Callable[[str, str], ConfigError]


class ConfigDict(dict[Any, Any]):
    """A dict whose keys can be read, set and deleted as attributes.

    Dicts that are put into it, also inside lists and tuples, become `ConfigDict`; the originals do not change. A key
    that is also the name of a dict method (``items``), or begins with two underscores, can only be read by index.

    Example:
        >>> cfg = ConfigDict(model=dict(width=3))
        >>> cfg.model.width = 5
        >>> cfg["model"]["width"]
        5
    """

    __slots__ = ()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self.update(*args, **kwargs)

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, _with_config_dicts(value))

    def __missing__(self, key: Any) -> Any:
        raise KeyError(self._no_key(key))

    def __getattr__(self, name: str) -> Any:
        # Copying and pickling look for special methods that do not exist; these are never keys.
        if not name.startswith("__") and name in self:
            return self[name]
        says = f"the key `{name}` can only be read by index" if name in self else self._no_key(name)
        if "type" in self:  # handed to a constructor of another package, say, that takes it for the object
            says += f" (this is the config of `{self['type']}`, not what is built from it)"
        raise AttributeError(says, name=name, obj=self)

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value

    def __delattr__(self, name: str) -> None:
        if name not in self:
            raise AttributeError(self._no_key(name), name=name, obj=self)
        del self[name]

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Set many keys. Where the old and the new value are dicts, the old one is updated in the same way.

        It takes what `dict.update` takes. `|=` is the same; `|` leaves both dicts as they are. ``_delete_`` is a key as
        any other here; `merge` knows it.

        Example:
            >>> cfg = ConfigDict(norm=dict(mean=0.5, std=0.2))
            >>> cfg.update(norm=dict(std=0.1))
            >>> cfg
            {'norm': {'mean': 0.5, 'std': 0.1}}
        """
        for key, value in dict(*args, **kwargs).items():
            old = self.get(key)
            if isinstance(old, ConfigDict) and isinstance(value, dict):
                old.update(value)
            else:
                self[key] = value

    def setdefault(self, key: Any, default: Any = None) -> Any:
        """Return the value of `key`; if it is missing, set it to `default` first."""
        if key not in self:
            self[key] = default
        return self[key]

    def copy(self) -> Self:
        """Return a copy that shares nested dicts with this one, but not the lists and tuples that hold them."""
        return copy(self)

    def deepcopy(self) -> Self:
        """Return a copy that shares no value with this dict."""
        return deepcopy(self)

    def merge(self, changes: Mapping[Any, Any]) -> None:
        """Merge `changes` into this dict; nested dicts are merged key by key.

        A dict with ``_delete_=True`` replaces the old dict instead.

        Raises:
            ConfigError: a dict would be merged into a value that is not a dict.

        Example:
            >>> model = ConfigDict(type="Net", head=dict(width=3, bias=True))
            >>> model.merge(dict(head=dict(width=5)))
            >>> model
            {'type': 'Net', 'head': {'width': 5, 'bias': True}}
        """
        result = merged(self, changes, lambda key, says: ConfigError(f"`{key}` {says}"))
        self.clear()
        self.update(result)

    def __or__(self, other: Any) -> Self:
        if not isinstance(other, Mapping):
            return NotImplemented
        result = self.copy()
        for key, value in other.items():
            old = self.get(key)
            result[key] = old | value if isinstance(old, ConfigDict) and isinstance(value, dict) else value
        return result

    def __ror__(self, other: Any) -> ConfigDict:
        return ConfigDict(other) | self if isinstance(other, Mapping) else NotImplemented

    def __ior__(self, other: Any) -> Self:
        self.update(other)
        return self

    def to_dict(self) -> dict[Any, Any]:
        """Return a plain dict, in which nested `ConfigDict` are also plain dicts."""
        return {key: _with_plain_dicts(value) for key, value in self.items()}

    def _no_key(self, key: Any) -> str:
        return f"no key `{key}`{did_you_mean(key, self, '')}"


def merged(base: Mapping[Any, Any], changes: Mapping[Any, Any], error: MakeError, prefix: str = "") -> ConfigDict:
    """Return `base` with `changes` merged into it.

    Dicts are merged key by key; any other value replaces the old one. A dict of `changes` with ``_delete_=True`` also
    replaces the old value.

    Args:
        base: the dict to change; not modified.
        changes: the changes; not modified.
        error: creates the errors.
        prefix: the dotted key of the two dicts, for errors, with a dot at its end.
    """
    result = ConfigDict() if _deletes(changes, error, prefix) else ConfigDict(base)
    for key, value in changes.items():
        name = f"{prefix}{key}"
        if key == DELETE:
            continue
        if not isinstance(value, dict):
            result[key] = value
            continue
        old = result.get(key, {})
        if not isinstance(old, dict) and not _deletes(value, error, f"{name}."):
            raise error(name, f"is a dict, but was {old!r} in the base; add {DELETE}=True to replace it")
        result[key] = merged(old, value, error, f"{name}.")
    return result


def _with_config_dicts(value: Any) -> Any:
    if isinstance(value, ConfigDict):
        return value
    if isinstance(value, dict):
        return ConfigDict(value)
    return mapped(_with_config_dicts, value)


def _with_plain_dicts(value: Any) -> Any:
    return value.to_dict() if isinstance(value, ConfigDict) else mapped(_with_plain_dicts, value)


def mapped(function: Any, value: Any) -> Any:
    """Apply `function` to the items of a list or tuple; return any other value unchanged."""
    if not isinstance(value, list | tuple):
        return value
    items = [function(item) for item in value]
    if isinstance(value, list):
        return items
    return type(value)(*items) if hasattr(value, "_fields") else tuple(items)


def items_below(value: object) -> list[tuple[str, Any]]:
    """Return the items of a dict, list, tuple or set with their keys or indices as strings; none for other values.

    Two keys may be one string, as True and `"True"`.
    """
    if isinstance(value, list | tuple | set | frozenset):
        value = dict(enumerate(value))
    return [(str(name), item) for name, item in value.items()] if isinstance(value, Mapping) else []


def leaves(value: object, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves of nested dicts, lists, tuples and sets by dotted key; what has no items is a leaf.

    Args:
        value: what to look into.
        key: its own dotted key.

    Example:
        >>> list(leaves(dict(model=dict(depths=[2, 4], init={}))))
        [('model.depths.0', 2), ('model.depths.1', 4), ('model.init', {})]
    """
    items = items_below(value)
    for name, item in items:
        yield from leaves(item, f"{key}.{name}" if key else name)
    if not items:
        yield key, value


def texts_in(value: object) -> Iterator[str]:
    """Yield every string in nested dicts, of which keys count, lists, tuples and sets."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from texts_in([*value, *value.values()])
    elif isinstance(value, list | tuple | set | frozenset):
        for item in value:
            yield from texts_in(item)


def _deletes(changes: Mapping[Any, Any], error: MakeError, prefix: str) -> bool:
    flag = changes.get(DELETE, False)
    if not isinstance(flag, bool):
        raise error(f"{prefix}{DELETE}", f"must be True or False, but is {flag!r}")
    return flag
