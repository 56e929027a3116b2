"""The base class of visualizers that write to an experiment tracker, through that tracker's own library."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

from lockstep.errors import ConfigError


class LibraryVisualizer(ABC):
    """Base class of visualizers that pass everything to an optional library, which `open` imports.

    A subclass names the package. Its `open` stores the run, client or writer that the library returns in `_opened`, and
    its `_end` ends it.

    Args:
        init_kwargs: arguments of the library, which come before the defaults of `open`.
        save_dir: a folder for the library.

    Raises:
        ConfigError: the package is not installed; the message says what to install.
    """

    package: ClassVar[str]
    extra: ClassVar[str | None] = None  # the extra of lockstep-engine with the package; None if it has the same name

    def __init__(self, init_kwargs: Mapping[str, Any] | None = None, save_dir: str | Path | None = None) -> None:
        if not is_installed(self.package):
            raise ConfigError(
                f"{type(self).__name__} needs the package `{self.package}`, which is not installed: "
                f"pip install 'lockstep-engine[{self.extra or self.package}]'"
            )
        self._init_kwargs = dict(init_kwargs or {})
        self._save_dir = save_dir
        self._opened: Any = None

    @property
    def opened(self) -> Any:
        """The library's run, client or writer, which `open` has made."""
        if self._opened is None:
            raise RuntimeError(f"{type(self).__name__} must be opened before it is used; a Runner does so")
        return self._opened

    def close(self, *, failed: bool = False) -> None:
        """End what was opened.

        Args:
            failed: whether the run has ended by an error.
        """
        opened, self._opened = self._opened, None
        if opened is not None:
            self._end(opened, failed=failed)

    @abstractmethod
    def _end(self, held: Any, *, failed: bool) -> None:
        """End what `open` stored in `_opened`."""


def is_installed(package: str) -> bool:
    """Return whether a package is installed, without importing it; a folder of its name, without code, is none."""
    if sys.modules.get(package) is not None:
        return True
    spec = find_spec(package)
    return spec is not None and spec.origin is not None


def with_suffix(folder: Path, suffixes: str | Sequence[str]) -> list[Path]:
    """Return the files of a folder whose names end in one of the suffixes, sorted; not those in folders inside it.

    Args:
        folder: a folder that exists.
        suffixes: one or several, such as `(".py", ".json")`.
    """
    ends = (suffixes,) if isinstance(suffixes, str) else tuple(suffixes)
    return sorted(path for path in folder.iterdir() if path.is_file() and path.name.endswith(ends))
