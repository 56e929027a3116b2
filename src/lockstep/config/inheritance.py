"""`_base_` and `_delete_`: how one config file builds upon others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

from lockstep.config.dictionary import ConfigDict
from lockstep.config.files import BASE, ConfigFile, read_file
from lockstep.errors import ConfigError

DELETE = "_delete_"


def load(path: Path, children: tuple[ConfigFile, ...] = ()) -> tuple[ConfigDict, str]:
    """Return what the file at `path` and its bases say together, and their texts, bases first.

    Args:
        path: absolute.
        children: the files that led here, the youngest first.

    Raises:
        FileNotFoundError: `path` does not exist.
        ConfigError: a base does not exist, leads back to itself or contradicts another; a file
            has an error. Names file, line and key.
    """
    file = read_file(path)
    base = ConfigDict()
    origin: dict[str, Path] = {}
    texts = []
    for base_path in file.bases():
        part, text = _load_base(base_path.resolve(), (*children, file))
        for key in part:
            if key in origin:
                raise file.error(BASE, f"gives `{key}` twice: in {origin[key]} and in {base_path}; keep one")
            origin[key] = base_path
        base.update(part)
        texts.append(text)
    own = ConfigDict(file.values(deepcopy(base)))
    texts.append(f"# {path}\n{file.text}")
    return merged(base, own, file.error), "\n".join(texts)


def _load_base(path: Path, children: tuple[ConfigFile, ...]) -> tuple[ConfigDict, str]:
    chain = [child.path for child in children]
    if path in chain:
        circle = " -> ".join(map(str, [*chain[chain.index(path) :], path]))
        raise children[-1].error(BASE, f"leads in a circle: {circle}")
    try:
        return load(path, children)
    except FileNotFoundError as error:
        raise children[-1].error(BASE, f"names a file that is missing: {error}") from error


def merged(
    base: Mapping[Any, Any],
    changes: Mapping[Any, Any],
    error: Callable[[str, str], ConfigError],
    prefix: str = "",
) -> ConfigDict:
    """Return `base` with `changes` laid over it.

    Dicts are merged key by key; anything else replaces what was there. A dict of `changes` with
    ``_delete_=True`` replaces too.

    Args:
        base: left as it is.
        changes: left as it is.
        error: makes the error from a dotted key and what is wrong with it.
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
        below = result.get(key, {})
        if not isinstance(below, dict):
            if not _deletes(value, error, f"{name}."):
                raise error(
                    name,
                    f"is a dict, but was {below!r} in the base; add {DELETE}=True to replace it",
                )
            below = {}
        result[key] = merged(below, value, error, f"{name}.")
    return result


def _deletes(changes: Mapping[Any, Any], error: Callable[[str, str], ConfigError], prefix: str) -> bool:
    flag = changes.get(DELETE, False)
    if not isinstance(flag, bool):
        raise error(f"{prefix}{DELETE}", f"must be True or False, but is {flag!r}")
    return flag
