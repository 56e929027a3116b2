"""Files behind URLs: web pages by Python's own client, and everything that fsspec reaches by lockstep's."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from lockstep.location import Location, locate
from mmengine.fileio.backends.base import BaseStorageBackend

__all__ = ["FsspecBackend", "HTTPBackend"]


class _Fetched(BaseStorageBackend):
    """A backend whose files are fetched to be used by their path."""

    @contextmanager
    def get_local_path(self, filepath: str) -> Iterator[str]:
        """Give the path of a copy on the disk, which is removed at the end of the context."""
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, os.path.basename(str(filepath).rstrip("/")) or "file")
            Path(path).write_bytes(self.get(filepath))
            yield path

    def get_text(self, filepath: str, encoding: str = "utf-8") -> str:
        """Return the content of a file as text."""
        return self.get(filepath).decode(encoding)


class HTTPBackend(_Fetched):
    """Files behind `http://` and `https://`; they can only be read."""

    def get(self, filepath: str) -> bytes:
        """Return the content of a file."""
        with urlopen(filepath) as answer:
            content: bytes = answer.read()
            return content


class FsspecBackend(_Fetched):
    """Files behind any other URL, such as `s3://`, `gs://` or `memory://`, as `lockstep.location` reaches them.

    Args:
        path_mapping: by what the beginnings of paths are replaced.
        **kwargs: further arguments, for clients that lockstep does not use; they have no effect.
    """

    def __init__(self, path_mapping: dict[str, str] | None = None, **kwargs: Any) -> None:
        super().__init__()
        self.path_mapping = path_mapping or {}

    def get(self, filepath: str) -> bytes:
        """Return the content of a file."""
        return self._at(filepath).read_bytes()

    def put(self, obj: bytes, filepath: str) -> None:
        """Write a file."""
        self._at(filepath).write_bytes(obj)

    def put_text(self, obj: str, filepath: str, encoding: str = "utf-8") -> None:
        """Write a file of text."""
        self.put(obj.encode(encoding), filepath)

    def exists(self, filepath: str) -> bool:
        """Return whether there is such a file or folder."""
        return self._at(filepath).exists()

    def isdir(self, filepath: str) -> bool:
        """Return whether it is a folder."""
        return self._at(filepath).is_dir()

    def isfile(self, filepath: str) -> bool:
        """Return whether it is a file."""
        return self._at(filepath).is_file()

    def remove(self, filepath: str) -> None:
        """Remove a file."""
        self._at(filepath).unlink()

    def join_path(self, filepath: str, *filepaths: str) -> str:
        """Return the joined URL."""
        return "/".join([str(filepath).rstrip("/"), *(one.strip("/") for one in filepaths)])

    def copyfile_from_local(self, src: str | Path, dst: str) -> str:
        """Send a file, and return its URL."""
        if self.isdir(dst):
            dst = self.join_path(dst, os.path.basename(src))
        self.put(Path(src).read_bytes(), dst)
        return dst

    def copyfile_to_local(self, src: str, dst: str | Path) -> str | Path:
        """Fetch a file, and return the path of the copy."""
        if os.path.isdir(dst):
            dst = os.path.join(dst, os.path.basename(src))
        Path(dst).write_bytes(self.get(src))
        return dst

    def list_dir_or_file(
        self,
        dir_path: str,
        list_dir: bool = True,
        list_file: bool = True,
        suffix: str | tuple[str, ...] | None = None,
        recursive: bool = False,
    ) -> Iterator[str]:
        """Yield what a folder holds, relative to it; see `LocalBackend.list_dir_or_file`."""
        if list_dir and suffix is not None:
            raise TypeError("`list_dir` must be False where `suffix` is given")
        folder: Any = self._at(dir_path)
        for entry in sorted(folder.iterdir(), key=str):
            if entry.name.startswith("."):
                continue
            if entry.is_dir():
                if list_dir:
                    yield entry.name
                if recursive:
                    inner = self.list_dir_or_file(str(entry), list_dir, list_file, suffix, recursive)
                    yield from (f"{entry.name}/{one}" for one in inner)
            elif list_file and (suffix is None or entry.name.endswith(suffix)):
                yield entry.name

    def _at(self, filepath: str) -> Location:
        filepath = str(filepath)
        for old, new in self.path_mapping.items():
            filepath = filepath.replace(old, new, 1)
        return locate(filepath)
