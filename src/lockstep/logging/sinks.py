"""The sink for all records of a run: files in JSON Lines format."""

from __future__ import annotations

import json
import logging
import math
import os
import warnings
from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

_logger = logging.getLogger(__name__)
_encode = json.JSONEncoder(allow_nan=False).encode


class JsonLinesSink:
    """A file with one JSON object per line, each readable as soon as it is written.

    Numbers that JSON does not support become the strings "nan", "inf" and "-inf". Where records can't be written, as on
    a full disk, there is a warning, once.

    Args:
        path: the file; created at the first record. Its folder must exist.
        has_times: whether each record says as `utc` when it was written, unless it has a value of that name.
    """

    def __init__(self, path: Path, *, has_times: bool = False) -> None:
        self.path = path
        self._has_times = has_times
        self._file: TextIO | None = None
        self._has_warned = False

    def write(self, record: Mapping[str, Any]) -> None:
        """Append a record, which others can read at once."""
        if self._has_times:
            record = {**record, "utc": record.get("utc", f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}")}
        try:
            line = _encode(record)
        except (TypeError, ValueError):  # not plain values, which is rare
            line = _encode(_plain(record))
        with self._failure_as_warning():
            if self._file is None:
                drop_torn_line(self.path)
                self._file = self.path.open("a", encoding="utf-8")
            self._file.write(f"{line}\n")
            self._file.flush()
            if os.fstat(self._file.fileno()).st_nlink == 0:
                raise FileNotFoundError("it has been removed")

    def close(self) -> None:
        """Close the file; another record opens it again."""
        file, self._file = self._file, None
        if file is not None:
            with self._failure_as_warning():
                file.close()

    @contextmanager
    def _failure_as_warning(self) -> Iterator[None]:
        """Warn of the first failure: what a training reports must not end it."""
        try:
            yield
        except OSError as error:
            if not self._has_warned:
                _logger.warning("records can't be written to %s: %s. The run goes on without them", self.path, error)
            self._has_warned = True


def placed(place: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record: where its values belong, and the values; one of the same name as a place gets `_` at its end."""
    return {**place, **renamed(values, place.keys())}


def renamed(values: Mapping[str, Any], taken: Set[str]) -> dict[str, Any]:
    """Return values by name; one whose name is taken gets `_` at its end, and a warning says so."""
    for name in sorted(taken & values.keys()):
        warnings.warn(
            f"a value called {name!r} is recorded as '{name}_', because each record has its own {name!r}", stacklevel=3
        )
    return {f"{name}_" if name in taken else name: value for name, value in values.items()}


def drop_torn_line(path: Path) -> None:
    """Cut off what follows the last line of a file: a full disk, or the end of a process, has left it incomplete.

    Another line after it would become a part of it.
    """
    if not path.is_file() or not path.stat().st_size:
        return
    with path.open("rb+") as file:
        file.seek(-1, os.SEEK_END)
        if file.read() != b"\n":
            file.seek(0)
            file.truncate(file.read().rfind(b"\n") + 1)


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, str | int | float | bool | None):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    # Tensors, and numpy's scalars and arrays, of which a longdouble stays what it is.
    plain = value.tolist() if hasattr(value, "tolist") else value
    return str(value) if type(plain) is type(value) else _plain(plain)
