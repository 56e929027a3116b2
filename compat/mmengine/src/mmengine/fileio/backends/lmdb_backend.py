"""Files in a database of LMDB."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from mmengine.fileio.backends.base import BaseStorageBackend

__all__ = ["LmdbBackend"]


class LmdbBackend(BaseStorageBackend):
    """Values of a database of LMDB, by their keys.

    Args:
        db_path: the folder of the database.
        readonly: open it for reading only.
        lock: lock it; needless for reading.
        readahead: let the system read ahead.
        **kwargs: further arguments of `lmdb.open`.

    Raises:
        ImportError: the package `lmdb` is not installed.
    """

    def __init__(
        self, db_path: str | Path, readonly: bool = True, lock: bool = False, readahead: bool = False, **kwargs: Any
    ) -> None:
        try:
            import_module("lmdb")
        except ImportError as error:
            raise ImportError("LmdbBackend needs the package lmdb. Install it with: pip install lmdb") from error
        self.db_path = str(db_path)
        self._options = {"readonly": readonly, "lock": lock, "readahead": readahead, **kwargs}
        self._client: Any = None  # opened at the first read, so that a process that is forked opens its own

    def get(self, filepath: str | Path) -> bytes:
        """Return the value of a key."""
        if self._client is None:
            self._client = import_module("lmdb").open(self.db_path, **self._options)
        with self._client.begin(write=False) as transaction:
            value: bytes = transaction.get(str(filepath).encode("ascii"))
        return value

    def get_text(self, filepath: str | Path, encoding: str = "utf-8") -> str:
        """Return the value of a key as text."""
        return self.get(filepath).decode(encoding)
