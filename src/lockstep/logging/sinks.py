"""The sink for all records of a run: files in JSON Lines format."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO


class JsonLinesSink:
    """A file with one JSON object per line, each readable as soon as it is written.

    Numbers that JSON does not support become the strings "nan", "inf" and "-inf".

    Args:
        path: the file; created at the first record. Its folder must exist.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: TextIO | None = None

    def write(self, record: Mapping[str, Any], *, flush: bool = True) -> None:
        """Append a record; without `flush`, it is readable only after the next record with `flush`."""
        if self._file is None:
            self._file = self.path.open("a", encoding="utf-8")
        try:
            line = json.dumps(record, allow_nan=False)
        except (TypeError, ValueError):  # not plain values, which is rare
            line = json.dumps({key: _plain(value) for key, value in record.items()}, allow_nan=False)
        self._file.write(f"{line}\n")
        if flush:
            self._file.flush()

    def close(self) -> None:
        """Close the file; another record opens it again."""
        if self._file is not None:
            self._file.close()
            self._file = None


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, str | int | float | bool | None):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    # numpy scalars and one-element tensors
    return _plain(value.item()) if hasattr(value, "item") else str(value)
