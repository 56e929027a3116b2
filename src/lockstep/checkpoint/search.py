"""Finding the checkpoints of a work_dir. This module does not import torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from lockstep.checkpoint.folder import POINTER_FILE, read_pointer
from lockstep.checkpoint.manifest import MANIFEST_FILE, Manifest, read_manifest
from lockstep.checkpoint.verify import OLD_FILES, check, is_checkpoint
from lockstep.errors import ConfigError

_MARKS = (MANIFEST_FILE, *OLD_FILES, "rank_*.safetensors", "__*.distcp")


@dataclass(frozen=True)
class Found:
    """A folder that is a checkpoint, or what is left of one.

    Attributes:
        directory: the folder.
    """

    directory: Path

    @cached_property
    def manifest(self) -> Manifest | None:
        """What its manifest says; None if there is none that can be read."""
        try:
            return read_manifest(self.directory)
        except ConfigError:
            return None

    @property
    def time(self) -> float:
        """When it was written, in seconds since 1970."""
        if self.manifest is not None:
            return float(self.manifest.written["time"])
        try:
            return max((path.lstat().st_mtime for path in self.directory.iterdir()), default=0.0)
        except OSError:  # a run is removing it just now
            return 0.0


def find_last_checkpoint(work_dir: Path) -> Path | None:
    """Return the checkpoint that the pointer of `work_dir` names, or None if there is none or it is not complete.

    Raises:
        ConfigError: the pointer is damaged, or leads out of the work_dir.
    """
    directory = read_pointer(work_dir)
    return directory if directory is not None and is_checkpoint(directory) else None


def find_checkpoints(roots: Sequence[Path]) -> list[Found]:
    """Return the checkpoints among these folders, the folders in them and those in these, the newest one first.

    Links to folders are not followed.
    """
    folders: dict[Path, None] = {}
    for root in roots:
        runs = _folders_in(root)
        folders.update(dict.fromkeys([root, *runs, *(folder for run in runs for folder in _folders_in(run))]))
    found = [Found(folder) for folder in folders if any(any(folder.glob(mark)) for mark in _MARKS)]
    return sorted(found, key=lambda one: one.time, reverse=True)


def candidates(work_dir: Path, roots: Sequence[Path] = ()) -> Iterator[tuple[Path, str | None]]:
    """Yield the checkpoints to resume from, the best one first, each with what is wrong with it, or None.

    The first is the one that the pointer names; then come all others, the newest one first. Checksums of data are
    not compared here. A damaged pointer is yielded like a damaged checkpoint.

    Args:
        work_dir: the work_dir.
        roots: further folders that hold its checkpoints.
    """
    first: list[Path] = []
    try:
        if (pointed := read_pointer(work_dir, roots)) is not None:
            first = [pointed]
    except ConfigError as error:
        yield work_dir / POINTER_FILE, str(error)
    others = [one.directory for one in find_checkpoints([work_dir, *roots])]
    for directory in [*first, *(other for other in others if other not in first)]:
        try:
            check(directory)
        except ConfigError as error:
            yield directory, str(error)
        else:
            yield directory, None


def _folders_in(folder: Path) -> list[Path]:
    try:
        return [path for path in folder.iterdir() if path.is_dir() and not path.is_symlink() and path.name[0] != "."]
    except OSError:  # not a folder, or a run is removing it just now
        return []
