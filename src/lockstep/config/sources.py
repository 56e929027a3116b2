"""Where the keys of a config were written."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from lockstep.config.config_file import ConfigFile, Place
from lockstep.config.files import read_file


class Sources:
    """A config file and those that it builds upon, which are looked at but not run.

    Args:
        file: the youngest of them.
        bases: the sources of each of its bases, in its order.
    """

    def __init__(self, file: ConfigFile, bases: list[Self]) -> None:
        self._file = file
        self._bases = bases

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read the file at `path` and its bases, which `Config.fromfile` has read before.

        Raises:
            OSError: one of them is not there any more.
        """
        file = read_file(path)
        return cls(file, [cls.read(base.path.resolve()) for base in file.bases()])

    def where(self, key: str) -> str:
        """Return file and line of a dotted key, or of the nearest key above it; "" for nowhere."""
        found = self._find(key)
        return "" if found is None else f"{found[0]}:{found[1].line}"

    def helpers(self) -> set[str]:
        """Return the keys that have done their work when the files have been read."""
        return self._file.helpers().union(*(base.helpers() for base in self._bases))

    def files(self) -> list[ConfigFile]:
        """Return all of the files, bases first."""
        return [*(file for base in self._bases for file in base.files()), self._file]

    def _find(self, key: str) -> tuple[Path, Place] | None:
        place = self._file.place_of(key)
        found = None if place is None else (self._file.path, place)
        name, dot, rest = key.partition(".")
        for base, sources in zip(self._file.bases(), self._bases, strict=True):
            inherited = name if base.names is None else base.names.get(name)
            below = None if inherited is None else sources._find(f"{inherited}{dot}{rest}")
            if below is not None and (found is None or below[1].depth > found[1].depth):
                found = below
        return found
