"""Where weights lie: on a disk, or behind a URL that fsspec understands."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeAlias

from lockstep.errors import ConfigError

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")
_PACKAGES = {"s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs"}
_CHUNK = 16 * 2**20


class RemotePath(NamedTuple):
    """A file or folder that fsspec reaches, with the methods of `pathlib.Path` that weights need.

    Attributes:
        url: the whole URL, such as `s3://bucket/net.safetensors`.
        path: the path in the filesystem.
        fs: the filesystem, an `fsspec.AbstractFileSystem`.

    Raises:
        OSError: from each method, whatever the filesystem itself raises.

    **Source**: `fsspec.core.url_to_fs`.
    """

    url: str
    path: str
    fs: Any

    def __str__(self) -> str:
        return self.url

    def __truediv__(self, name: str) -> RemotePath:
        return RemotePath(f"{self.url.rstrip('/')}/{name}", f"{self.path.rstrip('/')}/{name}", self.fs)

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.path.rstrip("/").rpartition("/")[2]

    @property
    def suffix(self) -> str:
        """The ending of the name, with its dot."""
        return Path(self.name).suffix

    def exists(self) -> bool:
        """Return whether there is such a file or folder."""
        with _reached(self):
            return bool(self.fs.exists(self.path))

    def is_file(self) -> bool:
        """Return whether it is a file."""
        with _reached(self):
            return bool(self.fs.isfile(self.path))

    def is_dir(self) -> bool:
        """Return whether it is a folder."""
        with _reached(self):
            return bool(self.fs.isdir(self.path))

    def iterdir(self) -> Iterator[RemotePath]:
        """Yield the files and folders within."""
        with _reached(self):
            self.fs.invalidate_cache()
            found = self.fs.ls(self.path, detail=False)
        yield from (self / str(one).rstrip("/").rpartition("/")[2] for one in found)

    def open(self, mode: str) -> IO[bytes]:
        """Open it as a file of bytes."""
        with _reached(self):
            opened: IO[bytes] = self.fs.open(self.path, mode)
            return opened

    def read_bytes(self) -> bytes:
        """Return the content of the file."""
        with _reached(self):
            content: bytes = self.fs.cat_file(self.path)
            return content

    def unlink(self) -> None:
        """Remove the file."""
        with _reached(self):
            self.fs.rm_file(self.path)


Location: TypeAlias = Path | RemotePath


def locate(path: str | Path | RemotePath) -> Location:
    """Return where a path or a URL leads.

    Example:
        >>> locate("work_dirs/net.pth").name, locate("memory://bucket/net.pth").suffix
        ('net.pth', '.pth')

    Raises:
        ConfigError: fsspec or the package that it needs for such a URL is not installed, or it does not know such URLs.
    """
    if not isinstance(path, str) or not _URL.match(path):
        return path if isinstance(path, RemotePath) else Path(path)
    protocol = path.partition("://")[0]
    try:
        from fsspec.core import url_to_fs

        fs, inner = url_to_fs(path)
    except (ImportError, ValueError) as error:
        extra = _PACKAGES.get(protocol)
        remedy = f"Install it with: pip install 'lockstep-engine[{extra}]'" if extra else "Give a path on a disk"
        raise ConfigError(f"{path} must be a path or a URL that fsspec can open, but: {error}. {remedy}") from error
    except Exception as error:  # the filesystem connects, and each has errors of its own
        raise ConfigError(f"{path} cannot be reached: {type(error).__name__}: {error}") from error
    return RemotePath(path, inner, fs)


def size_of(location: Location) -> int:
    """Return the size of a file in bytes."""
    if isinstance(location, Path):
        return location.stat().st_size
    with _reached(location):
        return int(location.fs.size(location.path))


def read_into(location: Location, start: int, target: memoryview) -> None:
    """Fill `target` with the bytes of a file from `start` on.

    **Cost**: for a file on a disk, no memory; else 16 MiB.

    Raises:
        OSError: the file cannot be read, or ends before.
    """
    if isinstance(location, Path):
        with location.open("rb", buffering=0) as file:
            file.seek(start)
            done = 0
            while done < len(target):
                count = file.readinto(target[done:])
                if not count:
                    raise OSError(f"{location} ends at byte {start + done}, before {start + len(target)}")
                done += count
        return
    for begin in range(0, len(target), _CHUNK):
        end = min(begin + _CHUNK, len(target))
        with _reached(location):
            read = location.fs.cat_file(location.path, start=start + begin, end=start + end)
        if len(read) != end - begin:
            raise OSError(f"{location} ends at byte {start + begin + len(read)}, before {start + len(target)}")
        target[begin:end] = read


def write_bytes(file: IO[bytes], content: memoryview) -> None:
    """Write to an open file in chunks, because a file of fsspec buffers what it gets at once."""
    for begin in range(0, len(content), _CHUNK):
        file.write(content[begin : begin + _CHUNK])


@contextmanager
def _reached(location: RemotePath) -> Iterator[None]:
    """Turn what a filesystem raises into an OSError that names the URL."""
    try:
        yield
    except Exception as error:  # each filesystem has errors of its own
        why = f"{type(error).__name__}: {error}".rstrip(": ")
        raise OSError(f"{location.url} cannot be reached: {why}") from error
