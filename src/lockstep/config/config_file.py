"""What every kind of config file offers, and the kind in YAML or JSON."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from lockstep.config.dictionary import ConfigDict
from lockstep.config.placeholders import BASE, filled
from lockstep.errors import ConfigError

# The first line of a file that `Config.dump` writes. It has lost the code that read its helping names.
DUMPED = "# Every key of the config, written by lockstep.\n"


class Location(NamedTuple):
    """Where a file writes a key, or the nearest one above it.

    Attributes:
        depth: how many parts of the dotted key the file spells out there; 0 for nowhere.
        line: counted from 1.
    """

    depth: int
    line: int


class Write(NamedTuple):
    """One place where a file writes a key.

    Attributes:
        path: the parts of the dotted key.
        line: counted from 1.
        variable: the name of the variable that is its value, if it is one.
    """

    path: list[str]
    line: int
    variable: str | None = None


@dataclass(frozen=True, slots=True)
class BaseFile:
    """A file that another one builds upon.

    Attributes:
        path: of the base.
        named_by: what in the other file names it.
        line: the line that does, where that is not the one of the key `named_by`.
        names: the keys that are taken from it, by the names that they get; None for all.
    """

    path: Path
    named_by: str = BASE
    line: int | None = None
    names: Mapping[str, str] | None = None


class ConfigFile(ABC):
    """The text of one config file.

    Attributes:
        path: absolute.
        text: as it stands in the file.
        imports_bases: whether it takes what it wants of its bases by itself; else it is laid over them.
    """

    imports_bases: bool = False

    def __init__(self, path: Path, text: str) -> None:
        self.path = path
        self.text = text

    @property
    @abstractmethod
    def base(self) -> Any:
        """What the file gives for `_base_`, or None."""

    @abstractmethod
    def values(self, base: ConfigDict, imported: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
        """Return the file's own values.

        Args:
            base: what it may refer to as `_base_`.
            imported: what each import of a base gives it, in order, where it imports them.
        """

    @abstractmethod
    def writes(self) -> Iterator[Write]:
        """Yield every place where the file writes a key, in order."""

    def names_read(self) -> set[str]:
        """Return the variables that the file's own code reads."""
        return set()

    def imports(self) -> list[str] | None:
        """Return the import statements of the file; None where it does more than import and give values.

        Whoever has the values, and has run these statements, need not run the file again.
        """
        return []

    def helpers(self) -> set[str]:
        """Return the names that have done their work when the file has been read.

        These are the variables that the file's own code reads; of a file that `Config.dump` has written, whose code is
        gone, all names.
        """
        return {write.path[0] for write in self.writes()} if self.text.startswith(DUMPED) else self.names_read()

    def locate(self, key: str, follow: int = 5) -> Location:
        """Return where the file writes a dotted key, or the nearest key above it.

        Of several places the one that spells out most of the key counts, and of these the last one. Names of variables
        are followed, at most `follow` of them.
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
        """Return the files that this one builds upon; their paths are relative to its own folder."""
        named = self.base
        if named is None:
            return []
        if isinstance(named, str):
            named = [named]
        if not isinstance(named, list | tuple) or not all(isinstance(n, str) for n in named):
            raise self.error(BASE, f"must be a path or a list of paths, but is {named!r}")
        return [BaseFile(self.path.parent / Path(filled(name, self.path)).expanduser()) for name in named]

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
        except json.JSONDecodeError as error:
            raise ConfigError(f"{path}:{error.lineno}: {error.msg}") from error
        except yaml.MarkedYAMLError as error:
            line = error.problem_mark.line + 1 if error.problem_mark else "?"
            raise ConfigError(f"{path}:{line}: {error.problem}") from error
        self._values: dict[str, Any] = {} if values is None else values
        if not isinstance(values, dict | None) or not all(isinstance(key, str) for key in self._values):
            raise ConfigError(f"{path}: must hold one mapping with strings as keys")

    @property
    def base(self) -> Any:
        """What the file gives for `_base_`."""
        return self._values.get(BASE)

    def values(self, base: ConfigDict, imported: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
        """Return what the file says; it has no way to refer to its base."""
        return {key: value for key, value in self._values.items() if key != BASE}

    def writes(self) -> Iterator[Write]:
        """Yield where the file writes keys, as the YAML parser, which reads JSON as well, counts lines."""
        try:
            yield from _writes_below([], yaml.compose(self.text, Loader=yaml.SafeLoader))
        except yaml.YAMLError:  # JSON may be indented by tabs, YAML may not
            return


def _writes_below(path: list[str], node: yaml.Node | None) -> Iterator[Write]:
    """Yield where the keys below a mapping or a sequence are written."""
    items: list[tuple[str, yaml.Node, yaml.Node]] = []
    if isinstance(node, yaml.MappingNode):
        items = [(name.value, name, value) for name, value in node.value]
    elif isinstance(node, yaml.SequenceNode):
        items = [(str(index), value, value) for index, value in enumerate(node.value)]
    for key, written, value in items:
        yield Write([*path, key], written.start_mark.line + 1)
        yield from _writes_below([*path, key], value)
