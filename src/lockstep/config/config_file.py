"""What every kind of config file offers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from lockstep.config.dictionary import ConfigDict
from lockstep.config.placeholders import filled
from lockstep.errors import ConfigError

BASE = "_base_"
# The first line of a file that `Config.dump` writes. It has lost the code that read its helping names.
DUMPED = "# Every key of the config, written by lockstep.\n"


class Location(NamedTuple):
    """Where a file writes a key, or the nearest one above it.

    Attributes:
        depth: how many parts of the dotted key the file spells out there.
        line: counted from 1.
    """

    depth: int
    line: int


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
    def locate(self, key: str) -> Location | None:
        """Return where the file writes a dotted key, or the nearest key above it; None for nowhere."""

    @abstractmethod
    def helpers(self) -> set[str]:
        """Return the names that have done their work when the file has been read.

        These are the variables that the file's own code reads; of a file that `Config.dump` has written, whose code is
        gone, all names.
        """

    def imports(self) -> list[str] | None:
        """Return the import statements of the file; None where it does more than import and give values.

        Whoever has the values, and has run these statements, need not run the file again.
        """
        return []

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
        if line is None and (location := self.locate(key)) is not None:
            line = location.line
        return ConfigError(f"{self.path}{f':{line}' if line else ''}: `{key}` {says}")
