"""Placeholders `{{ ... }}` in a config: parts of its file's path, and values of its bases."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lockstep.config.dictionary import mapped
from lockstep.errors import ConfigError

BASE = "_base_"
_PLACEHOLDER = re.compile(r"\{\{\s*(\$?\w[\w.]*)(:[^{}]*?)?\s*\}\}")
_FACTS: Mapping[str, Callable[[Path], str]] = {
    "fileDirname": lambda path: path.parent.as_posix(),
    "fileBasename": lambda path: path.name,
    "fileBasenameNoExtension": lambda path: path.stem,
    "fileExtname": lambda path: path.suffix,
}


def filled(value: Any, path: Path, base: Mapping[str, Any] | None = None) -> Any:
    """Return a copy of `value` in which the placeholders in all strings are filled in.

    Placeholders are `{{ fileDirname }}`, `{{ fileBasename }}`, `{{ fileBasenameNoExtension }}`, `{{ fileExtname }}` and
    `{{ _base_.a.b }}`. The last one keeps its type if it is the whole string. In a Python file, which can read them
    anyway, `{{ $NAME:default }}` is an environment variable. Other text in braces does not change.

    Args:
        value: the value of a key.
        path: the path of the config file.
        base: the values of the file's bases; None if they are not known yet.

    Raises:
        ConfigError: the bases have no such key; an environment variable is not set and has no default; or a file of
            data asks for one.

    Example:
        >>> filled({"dir": "runs/{{ fileBasenameNoExtension }}", "lr": "{{_base_.lr}}"}, Path("a/net.py"), {"lr": 0.1})
        {'dir': 'runs/net', 'lr': 0.1}
    """
    if isinstance(value, str):
        whole = _PLACEHOLDER.fullmatch(value)
        return _meant(whole, path, base) if whole else _PLACEHOLDER.sub(lambda m: str(_meant(m, path, base)), value)
    if isinstance(value, dict):
        return {key: filled(item, path, base) for key, item in value.items()}
    return mapped(lambda item: filled(item, path, base), value)


class Placeholders(ast.NodeTransformer):
    """Replaces `{{_base_.a.b}}` in the code of a config, which Python reads as a set of a set, by `_base_.a.b`.

    `{{'$NAME:default'}}` becomes the value that the text of this environment variable stands for in Python.

    Args:
        path: the path of the config file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def visit_Set(self, node: ast.Set) -> ast.expr:
        """Return the expression in the braces if they are such a placeholder; otherwise the node."""
        match node:
            case ast.Set([ast.Set([ast.Attribute() as inner])]) if ast.unparse(inner).startswith(f"{BASE}."):
                return inner
            case ast.Set([ast.Set([ast.Constant(str(text))])]) if text.lstrip().startswith("$"):
                return ast.copy_location(_as_code(filled(f"{{{{{text}}}}}", self._path)), node)
        self.generic_visit(node)
        return node


def _as_code(text: str) -> ast.expr:
    """Return a text as the literal that it is in Python, or else as a string."""
    try:
        ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return ast.Constant(text)
    return ast.parse(text, mode="eval").body


def _of_environ(match: re.Match[str], path: Path) -> str:
    if path.suffix != ".py":
        raise ConfigError(
            f"{path}: `{match[0]}` must not stand for an environment variable: a file of data may not read them. Write "
            "the config in Python, or give the value on the command line"
        )
    name, default = match[1].removeprefix("$"), (match[2] or ":")[1:].strip()
    if name not in os.environ and not default:
        raise ConfigError(f"{path}: `{match[0]}` needs the environment variable `{name}`, which is not set")
    return os.environ.get(name, default)


def _meant(match: re.Match[str], path: Path, base: Mapping[str, Any] | None) -> Any:
    name = match[1]
    if name.startswith("$"):
        return _of_environ(match, path)
    if match[2] is None and name in _FACTS:
        return _FACTS[name](path)
    first, *keys = name.split(".")
    if first != BASE or not keys or base is None:
        return match[0]
    found: Any = base
    for key in keys:
        if not isinstance(found, Mapping) or key not in found:
            raise ConfigError(f"{path}: `{match[0]}` must name a key of the bases, but they have no `{key}` there")
        found = found[key]
    return found
