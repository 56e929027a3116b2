"""Checks for optional libraries that only visualizers need."""

from __future__ import annotations

from importlib.util import find_spec
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
