"""The base class of config files, config files in YAML or JSON, and the placeholders `{{ ... }}` in any of them."""

from __future__ import annotations

import ast
import json
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from lockstep.config.dictionary import ConfigDict, mapped
from lockstep.errors import ConfigError

# The first line of a file that `Config.dump` writes. Such a file has lost the code that read its helper variables.
DUMP_HEADER = "# Every key of the config, written by lockstep.\n"
BASE = "_base_"
_PLACEHOLDER = re.compile(r"\{\{\s*(\$?\w[\w.]*)(:[^{}]*?)?\s*\}\}")
_FACTS: Mapping[str, Callable[[Path], str]] = {
    "fileDirname": lambda path: path.parent.as_posix(),
    "fileBasename": lambda path: path.name,
    "fileBasenameNoExtension": lambda path: path.stem,
    "fileExtname": lambda path: path.suffix,
}
_MOST_VALUES = 1_000_000
_MOST_LEVELS = 100


class Location(NamedTuple):
    """The place where a file sets a key, or its nearest parent key.

    Attributes:
        depth: how many parts of the dotted key the file sets there; 0 if it does not set the key.
        line: the line number, from 1.
    """

    depth: int
    line: int


class Write(NamedTuple):
    """One place where a file sets a key.

    Attributes:
        path: the parts of the dotted key.
        line: the line number, from 1.
        variable: the name of the variable, if the key's value is given as a variable.
    """

    path: list[str]
    line: int
    variable: str | None = None


@dataclass(frozen=True, slots=True)
class BaseFile:
    """A base: a file that another config file builds upon.

    Attributes:
        path: the path of the base.
        named_by: what in the other file names the base: the key `_base_` or `read_base()`.
        line: the line where it is named; None for the line of the key `named_by`.
        names: the keys that are taken from the base, by their new names; None for all keys.
        scope: the package that the base belongs to, if it is named as ``package::path``. What the base describes is
            built in the scope of that name.
    """

    path: Path
    named_by: str = BASE
    line: int | None = None
    names: Mapping[str, str] | None = None
    scope: str | None = None


class ConfigFile(ABC):
    """The text of one config file.

    Attributes:
        path: the absolute path.
        text: the text of the file.
        imports_bases: whether the file imports keys from its bases; otherwise it is merged into them.
    """

    imports_bases: bool = False

    def __init__(self, path: Path, text: str) -> None:
        self.path = path
        self.text = text

    @property
    @abstractmethod
    def base(self) -> Any:
        """The value of `_base_` in the file, or None."""

    @abstractmethod
    def values(self, base: ConfigDict, imported: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
        """Return the file's own values.

        Args:
            base: the values of the bases, which the file can read as `_base_`; a file in Python can also change them.
            imported: the keys that each import of a base provides, in order, if the file imports its bases.
        """

    @abstractmethod
    def writes(self) -> Iterator[Write]:
        """Yield every place where the file sets a key, in order."""

    def names_read(self) -> set[str]:
        """Return the variables that the file's own code reads."""
        return set()

    def intermediate_keys(self) -> set[str]:
        """Return the names that need no further use after the file has been read.

        These are the variables that the file's own code reads. In a file that `Config.dump` has written, which has lost
        that code, these are all names.
        """
        return {write.path[0] for write in self.writes()} if self.text.startswith(DUMP_HEADER) else self.names_read()

    def locate(self, key: str, follow: int = 5) -> Location:
        """Return where the file sets a dotted key, or its nearest parent key.

        Among several places, the one that sets most parts of the key counts, and among these the last one. Variables
        are followed to their own assignments, at most `follow` of them.
        """
        parts = key.split(".")
        found = Location(0, 0)
        for path, line, variable in self.writes():
            depth = len(path)
            if path != parts[:depth]:
                continue
            location = Location(depth, line)
            if variable is not None and follow and parts[depth:]:
                meant = self.locate(".".join([variable, *parts[depth:]]), follow - 1)
                if meant.depth > 1:
                    location = Location(depth + meant.depth - 1, meant.line)
            if location.depth >= found.depth:
                found = location
        return found

    def bases(self) -> list[BaseFile]:
        """Return the bases of this file; `_base_` has paths from the file's folder, or ``package::path``."""
        named = self.base
        if named is None:
            return []
        if isinstance(named, str):
            named = [named]
        if not isinstance(named, list | tuple) or not all(isinstance(n, str) for n in named):
            raise self.error(BASE, f"must be a path or a list of paths, but is {named!r}")
        return [self._base_file(filled(name, self.path)) for name in named]

    def _base_file(self, name: str) -> BaseFile:
        """Return a base: relative to the file's folder, or in a package, as ``package::path``."""
        package, colons, inner = name.partition("::")
        if not colons:
            return BaseFile(self.path.parent / os.path.expanduser(name))  # Path.expanduser fails for an unknown user
        if (folder := package_folder(package)) is None:
            raise self.error(BASE, f"names `{name}`, but there is no package `{package}`. Install it, or give a path")
        shipped = folder / ".mim" / "configs" / inner  # where OpenMMLab's packages have their configs
        return BaseFile(shipped if os.path.exists(shipped) else folder / inner, scope=package)

    def error(self, key: str, says: str, line: int | None = None) -> ConfigError:
        """Return an error that names this file, the line and the key."""
        line = line or self.locate(key).line
        return ConfigError(f"{self.path}{f':{line}' if line else ''}: `{key}` {says}")


def package_folder(name: str) -> Path | None:
    """Return the folder of a package that can be imported, which is not imported for that; None if there is none."""
    try:
        spec = find_spec(name) if name.isidentifier() else None
    except ValueError:  # of a module that was not imported, as `__main__`
        return None
    return Path(next(iter(spec.submodule_search_locations))) if spec and spec.submodule_search_locations else None


class _Loader(yaml.SafeLoader):
    """Refuses a key that a mapping has twice, of which YAML would take the last."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        first: dict[str, int] = {}  # lines, by key
        for key, _ in node.value:  # as they are written: merged ones, which may be overridden, are not yet there
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if key.value in first:
                    says = f"the key `{key.value}` is there twice, first in line {first[key.value]}"
                    raise yaml.constructor.ConstructorError(None, None, says, key.start_mark)
                first[key.value] = key.start_mark.line + 1
        return node

    def flatten_mapping(self, node: Any) -> None:
        super().flatten_mapping(node)
        # Without what is overridden, of which merges of merges would have twice as much each.
        name = {id(key): (key.tag, key.value) if isinstance(key, yaml.ScalarNode) else id(key) for key, _ in node.value}
        node.value = list({name[id(key)]: (key, value) for key, value in node.value}.values())


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of JSON, which must have each key once."""
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(
            f"the key `{next(name for name in names if names.count(name) > 1)}` is there twice in an object"
        )
    return values


class DataFile(ConfigFile):
    """A config in YAML or JSON."""

    def __init__(self, path: Path, text: str) -> None:
        super().__init__(path, text)
        try:
            if path.suffix == ".json":
                values = json.loads(text, object_pairs_hook=_without_repeats)
            else:
                values = yaml.load(text, _Loader)  # a subclass of the safe one
            _check_size(values)
        except json.JSONDecodeError as error:
            raise ConfigError(f"{path}:{error.lineno}: {error.msg}") from error
        except yaml.MarkedYAMLError as error:
            line = error.problem_mark.line + 1 if error.problem_mark else "?"
            begun = error.context_mark  # of the bracket or mapping that is not closed, for instance
            where = f" {error.context}, which begins in line {begun.line + 1}" if begun and error.context else ""
            raise ConfigError(f"{path}:{line}: {error.problem}{where}") from error
        except (yaml.YAMLError, ValueError) as error:
            raise ConfigError(f"{path}: {error}") from error
        except RecursionError:
            raise ConfigError(f"{path}: is nested too deeply") from None
        self._values: dict[str, Any] = {} if values is None else values
        if not isinstance(values, dict | None):
            raise ConfigError(f"{path}: must hold one mapping with strings as keys")
        for key in self._values:
            if not isinstance(key, str):
                words = ("off, no and false", "on, yes and true")[key] if isinstance(key, bool) else ""
                why = f", as YAML reads {words} without quotes. Quote it" if words else ""
                raise ConfigError(f"{path}: must hold one mapping with strings as keys, but has the key {key!r}{why}")

    @property
    def base(self) -> Any:
        """The value of `_base_` in the file, or None."""
        return self._values.get(BASE)

    def values(self, base: ConfigDict, imported: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
        """Return the file's own values; `base` is not used."""
        return {key: value for key, value in self._values.items() if key != BASE}

    def writes(self) -> Iterator[Write]:
        """Yield where the file sets keys. Lines come from the YAML parser, which also reads JSON."""
        try:
            # Aliases can stand for billions, of which merging leaves few values.
            yield from islice(_writes_below([], yaml.compose(self.text, Loader=yaml.SafeLoader)), _MOST_VALUES)
        except yaml.YAMLError:  # JSON may be indented with tabs, YAML may not
            return


def _check_size(values: object) -> None:
    """Raise a ValueError if data have absurdly many values: in YAML, a few aliases can stand for billions."""
    count, rest = 0, [iter((values,))]
    while rest:
        if (value := next(rest[-1], rest)) is rest:
            rest.pop()
            continue
        count += 1
        if count > _MOST_VALUES or len(rest) > _MOST_LEVELS:
            raise ValueError(
                f"contains itself, or has more than {_MOST_VALUES:,} values or {_MOST_LEVELS} levels, written out. A "
                "config describes a run; keep data in files of their own"
            )
        if isinstance(value, dict):
            rest.append(iter((*value.keys(), *value.values())))
        elif isinstance(value, list | tuple | set):
            rest.append(iter(value))


def _writes_below(path: list[str], node: yaml.Node | None) -> Iterator[Write]:
    """Yield where the keys inside a mapping or a sequence are set."""
    items: list[tuple[str, yaml.Node, yaml.Node]] = []
    if isinstance(node, yaml.MappingNode):
        items = [(name.value, name, value) for name, value in node.value]
    elif isinstance(node, yaml.SequenceNode):
        items = [(str(index), value, value) for index, value in enumerate(node.value)]
    for key, written, value in items:
        yield Write([*path, key], written.start_mark.line + 1)
        yield from _writes_below([*path, key], value)


def filled(value: Any, path: Path, base: Mapping[str, Any] | None = None) -> Any:
    """Return a copy of `value` in which the placeholders in its strings are filled in, other than keys and sets.

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
        return (
            _placeholder_value(whole, path, base)
            if whole
            else _PLACEHOLDER.sub(lambda m: str(_placeholder_value(m, path, base)), value)
        )
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
        literal = ast.parse(text.strip(), mode="eval").body
        ast.literal_eval(literal)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return ast.Constant(text)
    return literal


def _environment_variable(match: re.Match[str], path: Path) -> str:
    if path.suffix != ".py":
        raise ConfigError(
            f"{path}: `{match[0]}` must not stand for an environment variable: a file of data may not read them. Write "
            "the config in Python, or give the value on the command line"
        )
    name, default = match[1].removeprefix("$"), (match[2] or ":")[1:].strip()
    if name not in os.environ and not default:
        raise ConfigError(f"{path}: `{match[0]}` needs the environment variable `{name}`, which is not set")
    return os.environ.get(name, default)


def _placeholder_value(match: re.Match[str], path: Path, base: Mapping[str, Any] | None) -> Any:
    name = match[1]
    if name.startswith("$"):
        return _environment_variable(match, path)
    if match[2] is None and name in _FACTS:
        return _FACTS[name](path)
    first, *keys = name.split(".")
    if first != BASE or not keys or base is None:
        return match[0]
    found: Any = base
    for key in keys:
        if not isinstance(found, Mapping) or key not in found:
            says = f"must name a key of the bases, but they have no `{key}` there"
            if not base and path.suffix == ".py":
                says += f". What read_base() has imported is a variable: write `{'.'.join(keys)}` without quotes"
            raise ConfigError(f"{path}: `{match[0]}` {says}")
        found = found[key]
    return found
