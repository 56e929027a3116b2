"""Versions that can be compared."""

from __future__ import annotations

import os
import subprocess
import warnings

from packaging.version import parse

__all__ = ["digit_version", "get_git_hash"]

_STAGES = {"a": -3, "b": -2, "rc": -1}


def digit_version(version_str: str, length: int = 4) -> tuple[int, ...]:
    """Return a version as a tuple of numbers that sort as versions do.

    Args:
        version_str: the version; ``parrots`` is no version and gives an error.
        length: how many numbers the release has; missing ones are 0.

    Returns:
        The release, then two numbers: (stage, number) of a pre-release, where alpha is -3, beta -2, rc -1 and a
        development version -4; (1, number) of a post-release; else (0, 0).

    Example:
        >>> digit_version("1.2.0"), digit_version("2.0.0rc1"), digit_version("1.13.0+cu117")
        ((1, 2, 0, 0, 0, 0), (2, 0, 0, 0, -1, 1), (1, 13, 0, 0, 0, 0))
    """
    if "parrots" in version_str:
        raise AssertionError(f"`version_str` must be a version, but is {version_str!r}")
    version = parse(version_str)
    release = (*version.release, *([0] * length))[:length]
    if version.is_prerelease:
        if version.pre is None:
            return (*release, -4, 0)
        letter, number = version.pre
        if letter not in _STAGES:
            warnings.warn(f"unknown pre-release {letter!r} in the version {version_str}", stacklevel=2)
        return (*release, _STAGES.get(letter, -4), number)
    if version.is_postrelease:
        return (*release, 1, version.post or 0)
    return (*release, 0, 0)


def get_git_hash(fallback: str = "unknown", digits: int | None = None) -> str:
    """Return the hash of the commit that is checked out, or its first digits.

    Args:
        fallback: what to return where there is no repository.
        digits: how many digits; None for all.
    """
    if not isinstance(digits, int | None):
        raise TypeError(f"`digits` must be an int or None, but is {digits!r}")
    environ = {**os.environ, "LANGUAGE": "C", "LANG": "C", "LC_ALL": "C"}
    try:
        found = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, env=environ, check=True, text=True)
    except (OSError, subprocess.CalledProcessError):
        return fallback
    return found.stdout.strip()[:digits] or fallback
