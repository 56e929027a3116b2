"""Keeping a checkpoint on a disk while it is read: other processes do not remove what one of them holds.

A reader locks the manifest (`flock`, shared), and who removes a checkpoint first tries to lock it for itself. The
system lets go of a lock when its process ends, however it ends. Where there are no such locks, as in a bucket, a reader
may find that the checkpoint has been removed, and says so. This module does not import torch.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from lockstep.checkpoint.files import MANIFEST_FILE
from lockstep.location import Location


class Hold:
    """Holds one checkpoint at a time, until `release` or the end of the process."""

    def __init__(self) -> None:
        self._manifest: IO[bytes] | None = None

    def take(self, directory: Location) -> None:
        """Hold a checkpoint instead of the former one; do nothing where it is gone, or can't be locked."""
        self.release()
        if not isinstance(directory, Path):
            return
        with suppress(OSError):
            manifest = _open_plainly(directory / MANIFEST_FILE, os.O_RDONLY)
            self._manifest = manifest
            _lock(manifest, exclusive=False)

    def release(self) -> None:
        """Let go of the checkpoint."""
        manifest, self._manifest = self._manifest, None
        if manifest is not None:
            manifest.close()

    __del__ = release


@contextmanager
def held(directory: Location) -> Iterator[None]:
    """Hold a checkpoint in a block."""
    hold = Hold()
    hold.take(directory)
    try:
        yield
    finally:
        hold.release()


class Claim:
    """What a process needs to remove the files of a checkpoint: that no other one reads them, or removes them as well.

    Args:
        directory: the checkpoint, as it is now: another one may get its name meanwhile.
    """

    def __init__(self, directory: Path) -> None:
        self._manifest: IO[bytes] | None = None
        with suppress(OSError):  # it is gone, or may not be written to
            self._manifest = _open_plainly(directory / MANIFEST_FILE, os.O_RDWR)  # to lock it on NFS

    def is_granted(self) -> bool:
        """Return False where another process holds the checkpoint; True also where that can't be told."""
        with suppress(OSError):
            if self._manifest is not None:
                try:
                    _lock(self._manifest, exclusive=True)
                except BlockingIOError:
                    return False
        return True

    def close(self) -> None:
        """Let go of the checkpoint."""
        if self._manifest is not None:
            self._manifest.close()


def _open_plainly(path: Path, flags: int) -> IO[bytes]:
    descriptor = os.open(path, flags | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
    return os.fdopen(descriptor, "rb" if flags == os.O_RDONLY else "r+b", buffering=0)


def _lock(file: IO[bytes], *, exclusive: bool) -> None:
    try:
        import fcntl  # not available on Windows
    except ImportError:
        return
    fcntl.flock(file, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
