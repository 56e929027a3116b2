"""A bucket for several processes of one test: objects on the disk, `bucket:///path`, without a server.

As in S3, an object appears as a whole, when its file is closed; nothing can be renamed; there are no empty folders.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem


class Bucket(LocalFileSystem):
    """The filesystem.

    Attributes:
        before: called before each change with what is to be done and the path; may raise, or end the process.
        ranges: the ranges that were read, as (name, start, end).
    """

    protocol = "bucket"
    cachable = False
    before: Callable[[str, str], object] = staticmethod(lambda verb, path: None)
    ranges: list[tuple[str, int, int]] = []

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        if isinstance(path, list):
            return [cls._strip_protocol(one) for one in path]
        return super()._strip_protocol(str(path).removeprefix("bucket://"))

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        return _Object(path) if mode == "wb" else super()._open(path, mode, **options)

    def cat_file(self, path: str, start: Any = None, end: Any = None, **options: Any) -> bytes:
        if start is not None:
            self.ranges.append((path.rpartition("/")[2], start, end))
        return super().cat_file(path, start, end, **options)

    def rm_file(self, path: str) -> None:
        self.before("rm", path)
        with suppress(FileNotFoundError):  # as S3 does
            super().rm_file(path)
        with suppress(OSError):
            os.removedirs(os.path.dirname(path))

    def mv(self, *paths: Any, **options: Any) -> None:
        raise NotImplementedError("nothing can be renamed in a bucket")


class _Object:
    """A new object, written elsewhere until it is closed."""

    def __init__(self, path: str) -> None:
        self.path, self.closed = path, False
        self._file = tempfile.NamedTemporaryFile(delete=False)  # noqa: SIM115 -- closed below

    def write(self, content: bytes) -> int:
        Bucket.before("write", self.path)
        return self._file.write(content)

    def close(self) -> None:
        self._file.close()
        try:
            Bucket.before("put", self.path)
        except Exception:
            os.unlink(self._file.name)
            raise
        while not self.closed:
            # Another process has just removed the folder, which was empty; mkdir says then that it exists.
            with suppress(FileNotFoundError, FileExistsError):
                Path(self.path).parent.mkdir(parents=True, exist_ok=True)
                os.replace(self._file.name, self.path)
                self.closed = True

    def discard(self) -> None:
        self._file.close()
        with suppress(FileNotFoundError):
            os.unlink(self._file.name)

    def __enter__(self) -> _Object:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


@contextmanager
def watched(before: Callable[[str, str], object]) -> Iterator[None]:
    """Call a function before each change of a bucket by this process."""
    usual, Bucket.before = Bucket.before, staticmethod(before)
    try:
        yield
    finally:
        Bucket.before = staticmethod(usual)


fsspec.register_implementation("bucket", Bucket, clobber=True)
