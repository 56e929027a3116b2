"""Where files lie: on a disk, or behind a URL that fsspec understands. Only this module knows fsspec."""

from __future__ import annotations

import errno
import io
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from operator import methodcaller
from pathlib import Path, PurePosixPath
from typing import IO, Any, NamedTuple, TypeAlias

from lockstep.errors import ConfigError, error_in_words

_OTHER_FOLDER = "Choose another folder, or change its permissions"
_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG)
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")
# Also what `Path` makes of a URL, and URLs of fsspec that are chained, as simplecache::s3://bucket/x.
_LIKE_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*::)*[A-Za-z][A-Za-z0-9+.-]+:/")
_PACKAGES = {"s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs"}
_CHUNK = 16 * 2**20
_SHORT = 2**20  # bytes; shorter ranges are read out of a piece
_PARTS = 9000  # of an object that is sent; S3 takes 10,000
_PIECE = 4 * 2**20  # bytes of a request; several are under way at a time, if the filesystem can do that
_REMOVED_AT_A_TIME = 16  # objects


class Entry(NamedTuple):
    """An entry of a folder: its name, whether it is a folder, and its number of bytes."""

    name: str
    is_dir: bool
    size: int


class RemotePath(NamedTuple):
    """A file or folder that fsspec reaches, with the methods of `pathlib.Path` that weights and checkpoints need.

    Listings are never taken from a cache of the filesystem: other processes write, too.

    Attributes:
        url: the whole URL, such as `s3://bucket/net.safetensors`.
        path: the path in the filesystem.
        fs: the filesystem, an `fsspec.AbstractFileSystem`.

    Raises:
        OSError: from each method, whatever the filesystem itself raises; FileNotFoundError if that is what it says.

    **Source**: `fsspec.core.url_to_fs`.
    """

    url: str
    path: str
    fs: Any

    def __str__(self) -> str:
        return self.url

    def __truediv__(self, name: str | PurePosixPath) -> RemotePath:
        return RemotePath(f"{self.url.rstrip('/')}/{name}", f"{self.path.rstrip('/')}/{name}", self.fs)

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.path.rstrip("/").rpartition("/")[2]

    @property
    def suffix(self) -> str:
        """The ending of the name, with its dot."""
        return Path(self.name).suffix

    @property
    def parent(self) -> RemotePath:
        """The folder that it is in; of a bucket, itself."""
        inner = self.path.rstrip("/").rpartition("/")[0]
        if not inner.strip("/"):
            return self
        return RemotePath(self.url.rstrip("/").rpartition("/")[0], inner, self.fs)

    def relative_to(self, folder: RemotePath) -> PurePosixPath:
        """Return the path from a folder to it.

        Raises:
            ValueError: it does not lie in the folder.
        """
        return PurePosixPath(self.path).relative_to(PurePosixPath(folder.path))

    def exists(self) -> bool:
        """Return whether there is such a file or folder."""
        return bool(self._ask(self.fs.exists))

    def is_file(self) -> bool:
        """Return whether it is a file."""
        return bool(self._ask(self.fs.isfile))

    def is_dir(self) -> bool:
        """Return whether it is a folder."""
        return bool(self._ask(self.fs.isdir))

    def is_symlink(self) -> bool:
        """Return False: there are no links."""
        return False

    def entries(self) -> list[Entry]:
        """Return what lies directly in the folder; nothing if there is none, because a bucket has only objects."""
        try:
            found = self._ask(self.fs.ls, detail=True)
        except FileNotFoundError:
            return []
        this_folder = self.path.strip("/")
        return [
            Entry(str(one["name"]).rstrip("/").rpartition("/")[2], one["type"] == "directory", int(one["size"] or 0))
            for one in found
            if str(one["name"]).strip("/") != this_folder  # some filesystems list the folder itself
        ]

    def iterdir(self) -> Iterator[RemotePath]:
        """Yield the files and folders within."""
        yield from (self / entry.name for entry in self.entries())

    def files(self) -> list[RemotePath]:
        """Return all files in the folder and in folders within; none if it is a file."""
        found, folder = map(PurePosixPath, self._ask(self.fs.find)), PurePosixPath(self.path)
        return [self / one.relative_to(folder) for one in found if one != folder]

    def open(self, mode: str) -> IO[bytes]:
        """Open it as a file of bytes."""
        opened: IO[bytes] = self._ask(self.fs.open, mode=mode)
        return opened

    @contextmanager
    def sending(self, size: int) -> Iterator[Sender]:
        """Open a new file, which in a bucket appears when the block ends; if the block raises, nothing does.

        Other filesystems, such as that of memory://, may show what has been written so far, and keep it.

        Args:
            size: about how many bytes will be written, for the size of the parts in which they are sent.

        **Cost**: memory for a part of 16 MiB; of objects of more than 140 GiB, for one in 9000 parts of it.
        """
        file = self._ask(self.fs.open, mode="wb", block_size=max(_CHUNK, -(-size // _PARTS)))
        try:
            yield Sender(self, file)
            with self._errors_translated():
                file.close()
        except BaseException:
            with suppress(Exception):
                file.discard()
            with suppress(Exception):
                file.closed = True  # else it sends the rest when it is collected
            raise

    def read_bytes(self, start: int | None = None, end: int | None = None) -> bytes:
        """Return the content of the file, or the bytes of a range of it, fewer if it ends before."""
        return bytes(self._ask(self.fs.cat_file, start=start, end=end))

    def write_bytes(self, content: bytes) -> None:
        """Write the file as a whole: others see what was there before, or all of the content."""
        self._ask(self.fs.pipe_file, content)  # by position: filesystems differ in its name

    def unlink(self) -> None:
        """Remove the file."""
        self._ask(self.fs.rm_file)

    def modified(self) -> float:
        """Return when the file was written, in seconds since 1970."""
        return float(self._ask(self.fs.modified).timestamp())

    def _ask(self, method: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Return what a method of the filesystem returns for this path."""
        with self._errors_translated():
            return method(self.path, *arguments, **options)

    @contextmanager
    def _errors_translated(self) -> Iterator[None]:
        """Turn what the filesystem raises into an OSError that names the URL."""
        try:
            self.fs.invalidate_cache()
            yield
        except Exception as error:  # each filesystem has errors of its own
            why = error_in_words(error).rstrip(": ")
            kind = FileNotFoundError if isinstance(error, FileNotFoundError) else OSError
            raise kind(f"{self.url} cannot be reached: {why}") from error


class Sender(NamedTuple):
    """A remote file that is being written."""

    location: RemotePath
    file: Any

    def write(self, content: bytes | memoryview) -> None:
        """Write the bytes that follow."""
        with self.location._errors_translated():
            self.file.write(content)


Location: TypeAlias = Path | RemotePath


class RangeFile(io.RawIOBase):
    """A remote file that is read by ranges: long ones by themselves, short ones out of a piece of 4 MiB.

    **Cost**: a request for each 4 MiB; memory of at most 20 MiB.

    Args:
        location: the file.
        size: its size, if that is known; then short ranges near the end are read out of its last piece.
    """

    def __init__(self, location: RemotePath, size: int | None = None) -> None:
        self.name = str(location)
        self._location, self._size = location, size
        self._at = self._begin = 0
        self._window = b""

    def readable(self) -> bool:
        """Return True."""
        return True

    def seek(self, position: int, whence: int = 0, /) -> int:
        """Go to a position from the beginning."""
        assert whence == 0, "positions count from the beginning"
        self._at = position
        return position

    def readinto(self, target: Any, /) -> int:
        """Fill `target` with the bytes that follow; OSError if there are fewer."""
        view = memoryview(target)
        if len(view) >= _SHORT:
            read_into(self._location, self._at, view)
        else:
            end = self._at + len(view)
            if not self._begin <= self._at <= end <= self._begin + len(self._window):
                self._begin = self._at if self._size is None else max(0, min(self._at, self._size - _PIECE))
                self._window = self._location.read_bytes(self._begin, self._begin + _PIECE)
            if end > self._begin + len(self._window):
                raise OSError(f"{self.name} ends before byte {end}")
            view[:] = self._window[self._at - self._begin : end - self._begin]
        self._at += len(view)
        return len(view)


def locate(path: str | Location) -> Location:
    """Return a `Path` for a path on a disk, or a `RemotePath` for a URL; `~` is the user's home.

    Example:
        >>> locate("work_dirs/net.pth").name, locate("memory://bucket/net.pth").suffix
        ('net.pth', '.pth')

    Raises:
        ConfigError: fsspec or the package that it needs for such a URL is not installed, or it does not know such URLs;
            or it is a `Path` made of a URL, or names no bucket.
    """
    if isinstance(path, Path) and _LIKE_URL.match(str(path)):
        raise ConfigError(f"a URL must be given as a string, but is {path!r}, a path on the disk")
    if isinstance(path, str) and _LIKE_URL.match(path) and "::" in path:
        raise ConfigError(
            f"{path} must be one URL, but is a chain of them. Give the last one, which says where files lie"
        )
    if not isinstance(path, str) or not _URL.match(path):
        return path if isinstance(path, RemotePath) else Path(on_disk(path))
    protocol, _, inner = path.partition("://")
    if protocol in _PACKAGES:
        path = f"{protocol}://{re.sub('//+', '/', inner)}"
        if not inner.strip("/"):
            raise ConfigError(f"{path} must name a bucket, as in {protocol}://BUCKET/NAME")
    try:
        from fsspec.core import url_to_fs

        fs, inner = url_to_fs(path)
    except (ImportError, ValueError) as error:
        extra = _PACKAGES.get(protocol)
        remedy = f"Install it with: pip install 'lockstep-engine[{extra}]'" if extra else "Give a path on a disk"
        raise ConfigError(f"{path} must be a path or a URL that fsspec can open, but: {error}. {remedy}") from error
    except Exception as error:  # the filesystem connects, and each has errors of its own
        raise ConfigError(f"{path} cannot be reached: {error_in_words(error)}") from error
    if protocol in ("file", "local"):
        return Path(inner)
    return RemotePath(path.rstrip("/") if inner.strip("/") else path, inner, fs)


def on_disk(path: str | Path) -> str:
    """Return a path on the disk: `~` is the user's home, and letters that the locale lacks are written in UTF-8."""
    text = os.path.expanduser(path)
    try:
        os.fsencode(text)
    except UnicodeEncodeError:
        return os.fsdecode(text.encode("utf-8", "surrogateescape"))
    return text


def absolute(location: Location) -> Location:
    """Return where a location is, wherever the process goes."""
    return location.absolute() if isinstance(location, Path) else location


def require_disk(path: str | Path, argument: str) -> None:
    """Check that a path is no URL.

    Raises:
        ConfigError: it is one.
    """
    if _LIKE_URL.match(str(path)):
        raise ConfigError(
            f"`{argument}` must be a folder on a disk, but is {path}. Checkpoints may go to a bucket, by the `out_dir` "
            "of CheckpointHook, and weights by `lockstep export`"
        )


def disk_remedy(number: int | None, place: Path) -> str:
    """Return what is free where the system refused to write, and what to do, by the error's number; else "".

    Args:
        number: `errno` of the error.
        place: what was written to, or a folder that it lies in; it need not exist.
    """
    if number not in _DISK_ERRORS:
        return ""
    if number == errno.EROFS:
        return (
            "The disk is mounted read-only, or has become so after an error, which `dmesg` shows. Write elsewhere, or "
            "mount it anew"
        )
    if number == errno.EFBIG:
        return "A file would be larger than this process may write (`ulimit -f`) or than the disk allows"
    there = next((folder for folder in (place, *place.absolute().parents) if folder.exists()), place)
    with suppress(OSError):
        quota = " or by the quota" if number == errno.EDQUOT else ""
        disk = os.statvfs(there)
        if disk.f_files and not disk.f_favail:
            quota += ", but no further file can be made: its inodes are used up (`df -i`)"
        return (
            f"{shutil.disk_usage(there).free:,} bytes are free on the disk of {there}{quota}. Remove checkpoints "
            "(`lockstep checkpoints prune WORK_DIR --keep N`), keep fewer (`max_keep_ckpts`), or write elsewhere"
        )
    return ""


def is_of_disk(error: BaseException) -> bool:
    """Return whether an error says that a save has failed because of the disk, and what to do: a traceback hides it."""
    return isinstance(error, OSError) and error.errno in _DISK_ERRORS and bool(getattr(error, "failed_ranks", ()))


@contextmanager
def writing_into(folder: Path) -> Iterator[None]:
    """Let an error of the disk name the folder, and what to do: Python's own names neither.

    Raises:
        ConfigError: the disk takes no more.
    """
    try:
        yield
    except OSError as error:
        if not (remedy := disk_remedy(error.errno, folder)):
            raise
        raise ConfigError(f"{folder} must take the files of the run, but does not: {error}. {remedy}") from error


def make_folder(folder: Path, argument: str, *, anew: bool = False) -> None:
    """Create the folder that an argument or option names, or one in it; with `anew`, it must not exist yet.

    Raises:
        FileExistsError: it exists, and `anew` is True.
        ConfigError: it cannot be created, or not be written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=not anew)
    except OSError as error:
        if anew and isinstance(error, FileExistsError) and folder.parent.is_dir():  # no symbolic link to nothing
            raise
        raise ConfigError(
            f"`{argument}` must be a folder that can be created and written to, but {folder} cannot be created: "
            f"{error}. {disk_remedy(error.errno, folder) or _OTHER_FOLDER}"
        ) from error
    if not os.access(folder, os.W_OK | os.X_OK):
        is_read_only = hasattr(os, "statvfs") and os.statvfs(folder).f_flag & os.ST_RDONLY
        remedy = disk_remedy(errno.EROFS, folder) if is_read_only else _OTHER_FOLDER
        raise ConfigError(f"`{argument}` must be a folder that can be written to, but {folder} cannot. {remedy}")


def size_of(location: Location) -> int:
    """Return the size of a file in bytes."""
    if isinstance(location, Path):
        return location.stat().st_size
    return int(location._ask(location.fs.size))


def read_into(location: Location, start: int, target: memoryview) -> None:
    """Fill `target` with the bytes of a file from `start` on.

    **Cost**: for a file on a disk, no memory; else 16 MiB.

    Raises:
        OSError: the file cannot be read, or ends before.
    """
    if isinstance(location, Path):
        with location.open("rb") as file:
            file.seek(start)
            if (done := file.readinto(target)) < len(target):
                raise OSError(f"{location} ends at byte {start + done}, before {start + len(target)}")
        return
    for begin in range(0, len(target), _CHUNK):
        end = min(begin + _CHUNK, len(target))
        starts = range(begin, end, _PIECE)
        ends = [min(one + _PIECE, end) for one in starts]
        with location._errors_translated():
            pieces = location.fs.cat_ranges(
                [location.path] * len(ends), [start + one for one in starts], [start + one for one in ends],
                on_error="raise",
            )  # fmt: skip
        for first, last, piece in zip(starts, ends, pieces, strict=True):
            if len(piece) != last - first:
                raise OSError(f"{location} ends at byte {start + first + len(piece)}, before {start + len(target)}")
            target[first:last] = piece


def write_bytes(file: IO[bytes], content: memoryview) -> None:
    """Write to an open file in chunks, because a file of fsspec buffers what it gets at once."""
    for begin in range(0, len(content), _CHUNK):
        file.write(content[begin : begin + _CHUNK])


def unlink_all(locations: Iterable[Location]) -> None:
    """Remove files of a bucket, several at a time."""
    with ThreadPoolExecutor(_REMOVED_AT_A_TIME) as pool:
        for _ in pool.map(methodcaller("unlink"), locations):
            pass
