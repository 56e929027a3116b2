"""Text files as lists and dicts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from io import StringIO
from itertools import islice
from pathlib import Path
from typing import Any

from mmengine.fileio.io import _same_args, get_text

__all__ = ["dict_from_file", "list_from_file"]


def list_from_file(
    filename: str | Path,
    prefix: str = "",
    offset: int = 0,
    max_num: int = 0,
    encoding: str = "utf-8",
    file_client_args: Mapping[str, Any] | None = None,
    backend_args: Mapping[str, Any] | None = None,
) -> list[str]:
    r"""Return the lines of a file, without their ends.

    Args:
        filename: a path or URL.
        prefix: put before each line.
        offset: how many lines to leave out at the beginning.
        max_num: how many lines to return at most; 0 for all.
        encoding: of the file.
        file_client_args: MMEngine's older name of `backend_args`.
        backend_args: as for `get_file_backend`.
    """
    text = get_text(filename, encoding, _same_args(file_client_args, backend_args))
    lines = islice(StringIO(text), offset, offset + max_num if max_num > 0 else None)
    return [prefix + line.rstrip("\n\r") for line in lines]


def dict_from_file(
    filename: str | Path,
    key_type: Callable[[str], Any] = str,
    encoding: str = "utf-8",
    file_client_args: Mapping[str, Any] | None = None,
    backend_args: Mapping[str, Any] | None = None,
) -> dict[Any, Any]:
    """Return the lines of a file as a dict: the first word of each is a key, the others are its value.

    Args:
        filename: a path or URL.
        key_type: what a key becomes.
        encoding: of the file.
        file_client_args: MMEngine's older name of `backend_args`.
        backend_args: as for `get_file_backend`.

    Returns:
        A word as the value of each key, or a list of words where there are several.
    """
    found = {}
    for line in StringIO(get_text(filename, encoding, _same_args(file_client_args, backend_args))):
        key, *words = line.rstrip("\n").split(" ")
        if not words:
            raise AssertionError(f"each line of {filename} must have a key and a value, but one is {line!r}")
        found[key_type(key)] = words[0] if len(words) == 1 else words
    return found
