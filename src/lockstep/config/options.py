"""Changes to a config by dotted keys: ``optim_wrapper.optimizer.lr=0.1 hooks.0.interval=5``."""

from __future__ import annotations

import ast
import json
from argparse import Action, ArgumentParser, Namespace
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from lockstep.config.dictionary import DELETE, ConfigDict, merged
from lockstep.errors import ConfigError

# Not YAML's rules for scalars: in YAML 1.1 `1e-3` is a string, `off` is False and `12:30` is 750.
_WORDS = {"true": True, "false": False, "none": None, "null": None}
_CLOSING = {"[": "]", "(": ")", "{": "}"}


def parse_options(options: Iterable[str]) -> dict[str, Any]:
    """Parse ``key=value`` strings from a command line.

    A value is a Python literal if it can be read as one, or else JSON if it begins with ``{`` or ``[``. ``true``,
    ``false``, ``none`` and ``null`` are recognised in upper and lower case. Words in lists need no quotes; a value with
    commas is a list; any other value is a string. Of equal keys the last one counts.

    Raises:
        ConfigError: an option has no ``=`` or no key.

    Example:
        >>> parse_options(["a.b=1e-3", "c=[1,two]", "d=x,y", "e=True", "f='1'", "g=hello"])
        {'a.b': 0.001, 'c': [1, 'two'], 'd': ['x', 'y'], 'e': True, 'f': '1', 'g': 'hello'}
    """
    values: dict[str, Any] = {}
    for option in options:
        key, separator, text = option.partition("=")
        if not separator or not all(key.strip().split(".")):
            raise ConfigError(f"an option must be KEY=VALUE, as in a.b=1, but is {option!r}")
        values.pop(key.strip(), None)  # so that it is also the last in order: `a.x=1 a={'x':5} a.x=2`
        values[key.strip()] = _parse_value(text)
    return values


class DictAction(Action):
    """An argparse action that collects ``key=value`` strings in a dict for `Config.merge_from_dict`.

    Example:
        >>> import argparse
        >>> parser = argparse.ArgumentParser()
        >>> _ = parser.add_argument("--cfg-options", nargs="+", action=DictAction)
        >>> parser.parse_args(["--cfg-options", "a.b=1", "c=x,y"]).cfg_options
        {'a.b': 1, 'c': ['x', 'y']}
    """

    def __call__(self, parser: ArgumentParser, namespace: Namespace, values: Any, option_string: Any = None) -> None:
        """Add the values of one occurrence of the option to those of earlier ones."""
        try:
            given = parse_options([values] if isinstance(values, str) else values or ())
        except ConfigError as error:
            parser.error(str(error))
        earlier = getattr(namespace, self.dest) or {}
        kept = {key: value for key, value in earlier.items() if key not in given}
        setattr(namespace, self.dest, {**kept, **given})


def _parse_value(text: str) -> Any:
    text = text.strip()
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    parts = _split(text)
    if len(parts) > 1:
        return [_parse_value(part) for part in parts if part.strip()]
    with suppress(ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return ast.literal_eval(text)
    if text[:1] in ("[", "{"):
        with suppress(ValueError, RecursionError):
            return json.loads(text, parse_constant=str)  # NaN is a string here, as it is outside of JSON
    # Not `[0-9]+[a-z]`, whose first bracket closes before the end.
    if text[:1] in ("[", "(") and text[-1] == _CLOSING[text[0]] and 0 not in _depths(text)[:-1]:
        items = [_parse_value(part) for part in _split(text[1:-1]) if part.strip()]
        return items if text[0] == "[" else tuple(items)
    return text


def _split(text: str) -> list[str]:
    """Split at the commas outside brackets and quotes; do not split if these are not balanced."""
    depths = _depths(text)
    if depths and depths[-1]:
        return [text]
    parts = [""]
    for character, depth in zip(text, depths, strict=True):
        if character == "," and not depth:
            parts.append("")
        else:
            parts[-1] += character
    return parts


def _depths(text: str) -> list[int]:
    """Return how many brackets and quotes are open after each character."""
    depths: list[int] = []
    expected: list[str] = []  # closing brackets, or one quote, innermost last
    for character in text:
        quoted = bool(expected) and expected[-1] in "'\""
        if expected and character == expected[-1]:
            expected.pop()
        elif not quoted and character in _CLOSING:
            expected.append(_CLOSING[character])
        elif not quoted and character in "'\"":
            expected.append(character)
        depths.append(len(expected))
    return depths


def set_dotted(target: ConfigDict, dotted: str, value: Any) -> None:
    """Set the value at a dotted key; numbers index lists, and missing dicts are created.

    A dict is merged into an existing dict, unless it has ``_delete_=True``; one whose keys are numbers is merged into
    the items of an existing list that they index.

    Raises:
        ConfigError: the path of the key has a part that is neither a dict nor a list, or an index out of range.
    """
    *path, last = dotted.split(".")
    holder: Any = target
    for depth, part in enumerate(path):
        at = _key_or_index(holder, part, path[:depth], dotted)
        holder = holder.setdefault(at, {}) if isinstance(holder, ConfigDict) else holder[at]
    at = _key_or_index(holder, last, path, dotted)
    if isinstance(value, dict):
        below = holder[at] if isinstance(holder, list) else holder.get(at, {})
        value = _with_lists(below, value, dotted)
    if isinstance(value, dict):
        value = merged(below if isinstance(below, dict) else {}, value, _option_error, f"{dotted}.")
    holder[at] = value


def _with_lists(old: Any, new: Any, dotted: str) -> Any:
    """Return `new`, in which each dict whose keys index a list of `old` is replaced by that list with these changes."""
    if not isinstance(new, dict) or new.get(DELETE):
        return new
    if isinstance(old, dict):
        return {key: _with_lists(old.get(key), item, f"{dotted}.{key}") for key, item in new.items()}
    if not isinstance(old, list) or not new or not all(str(key).isdigit() for key in new):
        return new
    items = list(old)
    for key, item in new.items():
        at = _key_or_index(items, str(key), dotted.split("."), f"{dotted}.{key}")
        item = _with_lists(items[at], item, f"{dotted}.{key}")
        are_dicts = isinstance(item, dict) and isinstance(items[at], dict)
        items[at] = merged(items[at], item, _option_error, f"{dotted}.{key}.") if are_dicts else item
    return items


def _key_or_index(holder: Any, part: str, path: list[str], dotted: str) -> Any:
    """Return `part` as a key or an index of `holder`."""
    if isinstance(holder, ConfigDict):
        return part
    where = ".".join(path)
    if not isinstance(holder, list):
        raise _option_error(dotted, f"leads through `{where}`, which is {holder!r} and not a dict or list")
    try:
        index = int(part)
        holder[index]
    except (ValueError, IndexError):
        raise _option_error(
            dotted, f"must index the list `{where}` by a number below {len(holder)}, but has {part!r}"
        ) from None
    return index


def _option_error(key: str, says: str) -> ConfigError:
    return ConfigError(f"option `{key}` {says}")
