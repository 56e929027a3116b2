"""Paths on a disk."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

__all__ = [
    "check_file_exist",
    "find_vcs_root",
    "fopen",
    "is_abs",
    "is_filepath",
    "mkdir_or_exist",
    "scandir",
    "symlink",
]


def is_filepath(x: object) -> bool:
    """Return whether `x` is a str or a Path."""
    return isinstance(x, str | Path)


def fopen(filepath: str | Path, *args: Any, **kwargs: Any) -> IO[Any]:
    """Open a file, as `open` does.

    Raises:
        ValueError: `filepath` is neither a str nor a Path.
    """
    if not is_filepath(filepath):
        raise ValueError(f"`filepath` must be a str or a Path, but is {filepath!r}")
    file: IO[Any] = open(filepath, *args, **kwargs)  # noqa: SIM115 - the caller closes it
    return file


def check_file_exist(filename: str | Path, msg_tmpl: str = "there is no file `{}`") -> None:
    """Raise FileNotFoundError if there is no such file."""
    if not os.path.isfile(filename):
        raise FileNotFoundError(msg_tmpl.format(filename))


def mkdir_or_exist(dir_name: str | Path, mode: int = 0o777) -> None:
    """Create a folder and those above it, where they are missing; an empty name is nothing to create."""
    if dir_name != "":
        Path(dir_name).expanduser().mkdir(mode, parents=True, exist_ok=True)


def symlink(src: str | Path, dst: str | Path, overwrite: bool = True, **kwargs: Any) -> None:
    """Create a symbolic link `dst` that leads to `src`; one that is there is replaced with `overwrite`."""
    if os.path.lexists(dst) and overwrite:
        os.remove(dst)
    os.symlink(src, dst, **kwargs)


def scandir(
    dir_path: str | Path,
    suffix: str | tuple[str, ...] | None = None,
    recursive: bool = False,
    case_sensitive: bool = True,
) -> Iterator[str]:
    """Yield the files in a folder, relative to it, without hidden ones.

    Args:
        dir_path: the folder.
        suffix: one ending of names or several; None for any.
        recursive: also in the folders within, those with hidden names too.
        case_sensitive: whether `suffix` must have the case of the name.

    Raises:
        TypeError: `dir_path` or `suffix` are of another type.
    """
    if not isinstance(dir_path, str | Path):
        raise TypeError(f"`dir_path` must be a str or a Path, but is {dir_path!r}")
    if not isinstance(suffix, str | tuple | None):
        raise TypeError(f"`suffix` must be a str or a tuple of str, but is {suffix!r}")
    if suffix is not None and not case_sensitive:
        suffix = suffix.lower() if isinstance(suffix, str) else tuple(one.lower() for one in suffix)
    return _scan(str(dir_path), str(dir_path), suffix, recursive, case_sensitive)


def _scan(
    folder: str, root: str, suffix: str | tuple[str, ...] | None, recursive: bool, case_sensitive: bool
) -> Iterator[str]:
    for entry in os.scandir(folder):
        if entry.is_file():
            path = os.path.relpath(entry.path, root)
            named = path if case_sensitive else path.lower()
            if not entry.name.startswith(".") and (suffix is None or named.endswith(suffix)):
                yield path
        elif recursive and os.path.isdir(entry.path):
            yield from _scan(entry.path, root, suffix, recursive, case_sensitive)


def find_vcs_root(path: str | Path, markers: tuple[str, ...] = (".git",)) -> str | None:
    """Return the nearest folder, from `path` upwards, that holds one of the markers; None if there is none."""
    start = os.path.abspath(os.path.expanduser(path))
    folder = Path(os.path.dirname(start) if os.path.isfile(start) else start)
    found = (one for one in (folder, *folder.parents) if any((one / marker).exists() for marker in markers))
    return next((str(one) for one in found), None)


def is_abs(path: str) -> bool:
    """Return whether a path is absolute, or the URL of a web page or of a bucket.

    Example:
        >>> is_abs("/data"), is_abs("s3://bucket/data"), is_abs("data")
        (True, True, False)
    """
    return os.path.isabs(path) or path.startswith(("http://", "https://", "s3://"))
