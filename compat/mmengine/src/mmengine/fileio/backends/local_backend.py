"""Files on a disk."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mmengine.fileio.backends.base import BaseStorageBackend

__all__ = ["HardDiskBackend", "LocalBackend"]


class LocalBackend(BaseStorageBackend):
    """Files on a disk. Arguments are accepted, and have no effect, so that one config serves several backends."""

    _allow_symlink = True

    def __init__(self, **kwargs: Any) -> None:
        super().__init__()

    def get(self, filepath: str | Path) -> bytes:
        """Return the content of a file."""
        return Path(filepath).read_bytes()

    def get_text(self, filepath: str | Path, encoding: str = "utf-8") -> str:
        """Return the content of a file as text."""
        return Path(filepath).read_text(encoding)

    def put(self, obj: bytes, filepath: str | Path) -> None:
        """Write a file; the folder is created where it is missing."""
        _made(filepath).write_bytes(obj)

    def put_text(self, obj: str, filepath: str | Path, encoding: str = "utf-8") -> None:
        """Write a file of text; the folder is created where it is missing."""
        _made(filepath).write_text(obj, encoding)

    def exists(self, filepath: str | Path) -> bool:
        """Return whether there is such a file or folder."""
        return os.path.exists(filepath)

    def isdir(self, filepath: str | Path) -> bool:
        """Return whether it is a folder."""
        return os.path.isdir(filepath)

    def isfile(self, filepath: str | Path) -> bool:
        """Return whether it is a file."""
        return os.path.isfile(filepath)

    def join_path(self, filepath: str | Path, *filepaths: str | Path) -> str:
        """Return the joined path."""
        return str(os.path.join(filepath, *filepaths))

    @contextmanager
    def get_local_path(self, filepath: str | Path) -> Iterator[str | Path]:
        """Give the path itself: it is on the disk."""
        yield filepath

    def copyfile(self, src: str | Path, dst: str | Path) -> str:
        """Copy a file, into `dst` if that is a folder, and return the path of the copy."""
        if os.path.isdir(dst):
            dst = os.path.join(dst, os.path.basename(src))
        return str(shutil.copyfile(src, dst))

    def copytree(self, src: str | Path, dst: str | Path) -> str:
        """Copy a folder; `dst` must not exist."""
        return str(shutil.copytree(src, dst))

    def copyfile_from_local(self, src: str | Path, dst: str | Path) -> str:
        """Copy a file: the disk is where this backend reads and writes."""
        return self.copyfile(src, dst)

    def copytree_from_local(self, src: str | Path, dst: str | Path) -> str:
        """Copy a folder."""
        return self.copytree(src, dst)

    def copyfile_to_local(self, src: str | Path, dst: str | Path) -> str:
        """Copy a file."""
        return self.copyfile(src, dst)

    def copytree_to_local(self, src: str | Path, dst: str | Path) -> str:
        """Copy a folder."""
        return self.copytree(src, dst)

    def remove(self, filepath: str | Path) -> None:
        """Remove a file."""
        if os.path.isdir(filepath):
            raise IsADirectoryError(f"`filepath` must be a file, but {filepath} is a folder; use rmtree")
        os.remove(filepath)

    def rmtree(self, dir_path: str | Path) -> None:
        """Remove a folder with what it holds."""
        shutil.rmtree(dir_path)

    def copy_if_symlink_fails(self, src: str | Path, dst: str | Path) -> bool:
        """Link `dst` to `src`, or copy it where links cannot be made; return whether it is a link."""
        try:
            os.symlink(src, dst)
        except OSError:
            (self.copyfile if os.path.isfile(src) else self.copytree)(src, dst)
            return False
        return True

    def list_dir_or_file(
        self,
        dir_path: str | Path,
        list_dir: bool = True,
        list_file: bool = True,
        suffix: str | tuple[str, ...] | None = None,
        recursive: bool = False,
    ) -> Iterator[str]:
        """Yield what a folder holds, relative to it, without hidden entries.

        Args:
            dir_path: the folder.
            list_dir: yield folders; then `suffix` must not be given.
            list_file: yield files.
            suffix: the endings of the files that are yielded; None for any.
            recursive: also of the folders within.
        """
        if list_dir and suffix is not None:
            raise TypeError("`list_dir` must be False where `suffix` is given")
        if not isinstance(suffix, str | tuple | None):
            raise TypeError(f"`suffix` must be a str or a tuple of str, but is {suffix!r}")
        return _listed(str(dir_path), str(dir_path), list_dir, list_file, suffix, recursive)

    def generate_presigned_url(self, url: str, client_method: str = "get_object", expires_in: int = 3600) -> str:
        """Raise NotImplementedError: a file on a disk has no URL."""
        raise NotImplementedError("a file on a disk has no URL that others could read")


HardDiskBackend = LocalBackend


def _made(filepath: str | Path) -> Path:
    path = Path(filepath)
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def _listed(
    folder: str, root: str, list_dir: bool, list_file: bool, suffix: str | tuple[str, ...] | None, recursive: bool
) -> Iterator[str]:
    for entry in os.scandir(folder):
        path = os.path.relpath(entry.path, root)
        if entry.name.startswith("."):
            continue
        if entry.is_file():
            if list_file and (suffix is None or path.endswith(suffix)):
                yield path
        elif entry.is_dir():
            if list_dir:
                yield path
            if recursive:
                yield from _listed(entry.path, root, list_dir, list_file, suffix, recursive)
