"""What the visualizers share that write through an optional library."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TypeVar

from lockstep.errors import ConfigError

T = TypeVar("T")


def is_installed(package: str) -> bool:
    """Return whether a package is installed, without importing it."""
    return find_spec(package) is not None


def require(package: str, extra: str, who: str) -> None:
    """Make sure that a package is installed.

    Raises:
        ConfigError: it is not; the message says what to install.
    """
    if not is_installed(package):
        raise ConfigError(
            f"{who} needs the package `{package}`, which is not installed: pip install 'lockstep-engine[{extra}]'"
        )


def opened(held: T | None, visualizer: object) -> T:
    """Return what a visualizer holds while it is open.

    Raises:
        RuntimeError: it is not open.
    """
    if held is None:
        raise RuntimeError(f"{type(visualizer).__name__} must be opened before it is used; a Runner does so")
    return held


def with_suffix(folder: Path, suffixes: str | Sequence[str]) -> list[Path]:
    """Return the files of a folder whose names end in one of the suffixes, sorted; those of its folders are left out.

    Args:
        folder: a folder that exists.
        suffixes: one or several, such as `(".py", ".json")`.
    """
    ends = (suffixes,) if isinstance(suffixes, str) else tuple(suffixes)
    return sorted(path for path in folder.iterdir() if path.is_file() and path.name.endswith(ends))
