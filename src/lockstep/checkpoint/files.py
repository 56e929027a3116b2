"""The files of a checkpoint: read plainly, without following links, and written so that they last.

What differs between a disk and a bucket when a file is read or written stands here. A bucket has no links; an object
is durable, and visible at all, when the whole of it has arrived. A reader may find that the checkpoint has been removed
meanwhile, and says so. This module does not import torch.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from io import BufferedReader, FileIO
from pathlib import Path
from typing import TypeAlias

from lockstep.errors import CheckpointError
from lockstep.location import Location, RangeFile, RemotePath, Sender, size_of

MANIFEST_FILE = "manifest.json"
POINTER_FILE = "last_checkpoint"
DAMAGED = "The checkpoint is damaged: copy it again, or resume from another one"
_MOST_READ = 2 << 30  # bytes of a file that is read as a whole; a manifest has some hundred bytes for each tensor
_FLUSH = 32 << 20  # bytes that are written before the disk is asked to take them

PlainFile: TypeAlias = BufferedReader | RangeFile


def is_there(path: Location) -> bool:
    """Return whether a folder has such a name, even if it is that of a link that leads nowhere.

    Raises:
        CheckpointError: nobody can tell, because the folder cannot be read.
    """
    if isinstance(path, RemotePath):
        return path.exists()
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return False
    except OSError as error:
        raise _unreadable(path, error) from error
    return True


def modified(path: Location) -> float:
    """Return when a file was written, in seconds since 1970."""
    return path.modified() if isinstance(path, RemotePath) else path.lstat().st_mtime


def sizes_in(folder: Location) -> dict[str, int]:
    """Return the sizes of what lies directly in a folder, by name; of nothing, if the folder has been removed."""
    if isinstance(folder, RemotePath):
        return {entry.name: entry.size for entry in folder.entries()}
    sizes = {}
    with suppress(FileNotFoundError):  # a run is removing it just now
        for path in folder.iterdir():
            sizes[path.name] = path.lstat().st_size
    return sizes


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
        raise _unreadable(path, error) from error


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
    except FileNotFoundError as error:
        raise _missing(path, wanted) from error
    except OSError as error:
        raise _unreadable(path, error) from error
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
    return open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW))


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
            self._flush.result()  # Linux tells each error of a disk once
            self._flush, self._flushed = self._flusher.submit(os.fsync, self._file.fileno()), self._file.tell()

    def finish(self) -> None:
        """Wait until the disk has all of it."""
        self._flush.result()
        os.fsync(self._file.fileno())


def write_durably(path: Path, data: bytes) -> None:
    """Write a file, and wait until the disk has it. What goes wrong names the file."""
    try:
        with path.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        error.filename = str(path)
        raise


def sync_folder(folder: Path) -> None:
    """Wait until the disk has the names in a folder."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def removed(folder: Location) -> CheckpointError:
    """Return the error for a checkpoint that was removed."""
    return CheckpointError(
        f"{folder} has been removed, as `max_keep_ckpts` of a run does with old checkpoints. Take another one"
    )


def _unreadable(path: Location, error: OSError) -> CheckpointError:
    return CheckpointError(f"{path} cannot be read: {error.strerror or error}")


def _missing(path: Location, wanted: str) -> CheckpointError:
    """Return the error for a file that is not there, because it was lost, or because the checkpoint was removed."""
    if not is_there(path.parent / MANIFEST_FILE):
        return removed(path.parent)
    return CheckpointError(f"{path} must {wanted}, but is not there. {DAMAGED}")


def _require_size(path: Location, found: int, size: int | None) -> None:
    if size is not None and found != size:
        raise CheckpointError(f"{path} must have {size} bytes, but has {found}. {DAMAGED}")
