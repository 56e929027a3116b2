"""The base class of config files, and config files in YAML or JSON."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from lockstep.config.dictionary import ConfigDict
from lockstep.config.placeholders import BASE, filled
from lockstep.errors import ConfigError

# The first line of a file that `Config.dump` writes. Such a file has lost the code that read its helper variables.
DUMPED = "# Every key of the config, written by lockstep.\n"
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

    def imports(self) -> list[str] | None:
        """Return the import statements of the file; None if it does more than import and give values.

        A process that has the values, and has run these statements, need not run the file again.
        """
        return []

    def helpers(self) -> set[str]:
        """Return the names that need no further use after the file has been read.

        These are the variables that the file's own code reads. In a file that `Config.dump` has written, which has lost
        that code, these are all names.
        """
        return {write.path[0] for write in self.writes()} if self.text.startswith(DUMPED) else self.names_read()

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
            return BaseFile(self.path.parent / Path(name).expanduser())
        spec = find_spec(package) if package.isidentifier() else None
        if spec is None or not spec.submodule_search_locations:
            raise self.error(BASE, f"names `{name}`, but there is no package `{package}`. Install it, or give a path")
        folder = Path(next(iter(spec.submodule_search_locations)))
        shipped = folder / ".mim" / "configs" / inner  # where OpenMMLab's packages have their configs
        return BaseFile(shipped if shipped.exists() else folder / inner, scope=package)

    def error(self, key: str, says: str, line: int | None = None) -> ConfigError:
        """Return an error that names this file, the line and the key."""
        line = line or self.locate(key).line
        return ConfigError(f"{self.path}{f':{line}' if line else ''}: `{key}` {says}")


class DataFile(ConfigFile):
    """A config in YAML or JSON."""

    def __init__(self, path: Path, text: str) -> None:
        super().__init__(path, text)
        try:
            values = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
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
        if not isinstance(values, dict | None) or not all(isinstance(key, str) for key in self._values):
            raise ConfigError(f"{path}: must hold one mapping with strings as keys")

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
            yield from _writes_below([], yaml.compose(self.text, Loader=yaml.SafeLoader))
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
