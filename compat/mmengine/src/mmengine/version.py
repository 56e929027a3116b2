"""Versions: of MMEngine, whose names are here; of this distribution; and of lockstep, which runs behind them."""

from __future__ import annotations

from lockstep.version import __version__ as lockstep

distribution = "0.1.0.dev0"
"""The version of the distribution lockstep-mmengine."""
__version__ = "0.10.7"
"""The version of MMEngine whose names are offered. Packages compare it with the range that they were written for."""

__all__ = ["__version__", "distribution", "lockstep", "parse_version_info", "version_info"]


def parse_version_info(version: str) -> tuple[int | str, ...]:
    """Return the parts of a version, with a release candidate as its own part.

    Example:
        >>> parse_version_info("0.10.7"), parse_version_info("1.0.0rc2")
        ((0, 10, 7), (1, 0, 0, 'rc2'))
    """
    parts: list[int | str] = []
    for part in version.split("."):
        number, rc, candidate = part.partition("rc")
        if number.isdigit():
            parts.append(int(number))
        if rc:
            parts.append(f"rc{candidate}")
    return tuple(parts)


version_info = parse_version_info(__version__)
