"""The files of a checkpoint: read plainly, without following links, written so that they last, and held while read.

What differs between a disk and a bucket when a file is read or written stands here. A bucket has no links; an object
is durable, and visible at all, when the whole of it has arrived.

On a disk, a process that reads a checkpoint locks its manifest (`flock`, shared), and one that removes a checkpoint
first tries to lock it for itself. The system lets go of a lock when its process ends, however it ends. Where there are
no such locks, as in a bucket, a reader may find that the checkpoint has been removed, and says so. This module does not
import torch.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from io import BufferedReader, FileIO
from pathlib import Path
from typing import IO, TypeAlias

from lockstep.errors import CheckpointError
from lockstep.location import Location, RangeFile, RemotePath, Sender, size_of

MANIFEST_FILE = "manifest.json"
POINTER_FILE = "last_checkpoint"
DAMAGED = "The checkpoint is damaged: copy it again, or resume from another one"
_MOST_READ = 2 << 30  # bytes of a file that is read as a whole; a manifest has some hundred bytes for each tensor
_FLUSH = 32 << 20  # bytes that are written before the disk is asked to take them

PlainFile: TypeAlias = BufferedReader | RangeFile


def is_there(path: Location) -> bool:
    """Return whether a folder has such a name, even if it is that of a link that leads nowhere."""
    return path.exists() if isinstance(path, RemotePath) else os.path.lexists(path)


def modified(path: Location) -> float:
    """Return when a file was written, in seconds since 1970."""
    return path.modified() if isinstance(path, RemotePath) else path.lstat().st_mtime


def sizes_in(folder: Location) -> dict[str, int]:
    """Return the sizes of what lies directly in a folder, by name."""
    if isinstance(folder, RemotePath):
        return {entry.name: entry.size for entry in folder.entries()}
    return {path.name: path.lstat().st_size for path in folder.iterdir()}


def read_plain_file(path: Location, most: int = _MOST_READ) -> bytes:
    """Return what is in a file that is neither a link nor anything else than a file, and has at most `most` bytes.

    Raises:
        CheckpointError: it is not a plain file, is too large, or cannot be read.
    """
    if isinstance(path, Path):
        require_plain_file(path)
    try:
        if (size := size_of(path)) > most:
            raise CheckpointError(f"{path} must have at most {most:,} bytes, but has {size:,}. {DAMAGED}")
        return path.read_bytes()
    except FileNotFoundError as error:
        raise _missing(path, "be there") from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}. {DAMAGED}") from error


def require_plain_files(folder: Location, sizes: Mapping[str, int]) -> None:
    """Check that files of a checkpoint are files, and have their sizes.

    Raises:
        CheckpointError: one is not.
    """
    if isinstance(folder, Path):
        for name, size in sizes.items():
            require_plain_file(folder / name, size)
        return
    found = sizes_in(folder)  # in one request
    for name, size in sizes.items():
        if name not in found:
            raise _missing(folder / name, f"have {size} bytes")
        _require_size(folder / name, found[name], size)


def require_plain_file(path: Location, size: int | None = None) -> None:
    """Check that a file of a checkpoint is a file, and has its size.

    Raises:
        CheckpointError: it is not.
    """
    wanted = "be there" if size is None else f"have {size} bytes"
    if isinstance(path, RemotePath):
        try:
            _require_size(path, size_of(path), size)
        except FileNotFoundError as error:
            raise _missing(path, wanted) from error
        return
    try:
        found = path.lstat()
    except OSError as error:
        raise _missing(path, wanted, f": {error.strerror}") from error
    if stat.S_ISLNK(found.st_mode):
        raise CheckpointError(
            f"{path} must be a file, but is a link: links are not followed in a checkpoint. Replace it by what it "
            "leads to"
        )
    if not stat.S_ISREG(found.st_mode):
        raise CheckpointError(f"{path} must be a file, but is something else. {DAMAGED}")
    _require_size(path, found.st_size, size)


def open_plainly(path: Location, size: int | None = None) -> PlainFile:
    """Open a file of a checkpoint for reading, unless it is a link; its size, if it is known, saves requests."""
    if isinstance(path, RemotePath):
        return RangeFile(path, size)
    return open(path, "rb", opener=lambda name, flags: os.open(name, flags | getattr(os, "O_NOFOLLOW", 0)))


@contextmanager
def writing(path: Location, size: int) -> Iterator[Sender | _DurableFile]:
    """Write a new file; when the block has ended, it is on the disk or in the bucket.

    Args:
        path: the file.
        size: about how many bytes it will have.
    """
    if isinstance(path, RemotePath):
        with path.sending(size) as sender:
            yield sender
        return
    with path.open("xb", buffering=0) as file, ThreadPoolExecutor(1) as flusher:
        durable = _DurableFile(file, flusher)
        yield durable
        durable.finish()


class _DurableFile:
    """A file on a disk, which takes what has been written while more is written."""

    def __init__(self, file: FileIO, flusher: ThreadPoolExecutor) -> None:
        self._file, self._flusher = file, flusher
        self._flush, self._flushed = flusher.submit(os.fsync, file.fileno()), 0

    def write(self, content: bytes | memoryview) -> None:
        """Write the bytes that follow."""
        done = 0
        while done < len(content):
            done += self._file.write(content[done:])
        if self._file.tell() - self._flushed > _FLUSH and self._flush.done():
            self._flush, self._flushed = self._flusher.submit(os.fsync, self._file.fileno()), self._file.tell()

    def finish(self) -> None:
        """Wait until the disk has all of it."""
        self._flush.result()
        os.fsync(self._file.fileno())


def write_durably(path: Path, data: bytes) -> None:
    """Write a file, and wait until the disk has it."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Wait until the disk has the names in a folder."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def held(directory: Location) -> Iterator[None]:
    """Hold a checkpoint in a block; do nothing where it is gone, or can't be locked."""
    with ExitStack() as stack:
        if isinstance(directory, Path):
            with suppress(OSError):
                lock(stack.enter_context(_open_manifest(directory, os.O_RDONLY)), exclusive=False)
        yield


class Claim:
    """What a process needs to remove the files of a checkpoint: that no other one reads them, or removes them as well.

    Args:
        directory: the checkpoint, as it is now: another one may get its name meanwhile.
    """

    def __init__(self, directory: Path) -> None:
        self._manifest: IO[bytes] | None = None
        with suppress(OSError):  # it is gone, or may not be written to
            self._manifest = _open_manifest(directory, os.O_RDWR)  # to lock it on NFS

    def is_granted(self) -> bool:
        """Return False where another process holds the checkpoint; True also where that can't be told."""
        with suppress(OSError):
            if self._manifest is not None:
                try:
                    lock(self._manifest, exclusive=True)
                except BlockingIOError:
                    return False
        return True

    def close(self) -> None:
        """Let go of the checkpoint."""
        if self._manifest is not None:
            self._manifest.close()


def removed(folder: Location) -> CheckpointError:
    """Return the error for a checkpoint that was removed."""
    return CheckpointError(
        f"{folder} has been removed, as `max_keep_ckpts` of a run does with old checkpoints. Take another one"
    )


def _missing(path: Location, wanted: str, why: str = "") -> CheckpointError:
    """Return the error for a file that is not there, because it was lost, or because the checkpoint was removed."""
    if not is_there(path.parent / MANIFEST_FILE):
        return removed(path.parent)
    return CheckpointError(f"{path} must {wanted}, but is not there{why}. {DAMAGED}")


def _require_size(path: Location, found: int, size: int | None) -> None:
    if size is not None and found != size:
        raise CheckpointError(f"{path} must have {size} bytes, but has {found}. {DAMAGED}")


def _open_manifest(directory: Path, flags: int) -> IO[bytes]:
    descriptor = os.open(directory / MANIFEST_FILE, flags | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
    return os.fdopen(descriptor, "rb" if flags == os.O_RDONLY else "r+b", buffering=0)


def lock(file: IO[bytes], *, exclusive: bool) -> None:
    """Lock an open file until it is closed, if the system has such locks.

    Raises:
        BlockingIOError: another one has locked it.
        OSError: there are no locks where the file is.
    """
    try:
        import fcntl  # not available on Windows
    except ImportError:
        return
    fcntl.flock(file, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
