"""Finding the checkpoints of a work_dir. This module does not import torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from lockstep.checkpoint.files import MANIFEST_FILE, modified, removed
from lockstep.checkpoint.manifest import OWN_FILES, Manifest, read_manifest
from lockstep.checkpoint.pointer import POINTER_FILE, read_pointer
from lockstep.checkpoint.verify import check, is_checkpoint
from lockstep.errors import ConfigError
from lockstep.location import Location, RemotePath


@dataclass(frozen=True)
class Found:
    """A folder that is a checkpoint, or what is left of one.

    Attributes:
        directory: the folder.
    """

    directory: Location

    @cached_property
    def manifest(self) -> Manifest | None:
        """What its manifest says; None if there is none that can be read."""
        with suppress(ConfigError):
            return read_manifest(self.directory)
        return None

    @property
    def time(self) -> float:
        """When it was written, in seconds since 1970."""
        if self.manifest is not None:
            return float(self.manifest.written["time"])
        with suppress(OSError):  # a run is removing it just now
            return max((modified(path) for path in self.directory.iterdir()), default=0.0)
        return 0.0


def written_at(directory: Location) -> float:
    """Return when a checkpoint was written, in seconds since 1970; 0 if there is none."""
    return Found(directory).time


def find_last_checkpoint(work_dir: Location) -> Location | None:
    """Return the checkpoint that the pointer of `work_dir` names, or None if there is none or it is not complete.

    Raises:
        ConfigError: the pointer is damaged, or leads out of the work_dir.
    """
    directory = read_pointer(work_dir)
    return directory if directory is not None and is_checkpoint(directory) else None


def find_checkpoints(roots: Sequence[Location]) -> list[Found]:
    """Return the checkpoints among these folders, the folders in them and those in these, the newest one first.

    Links to folders are not followed. In a bucket, a folder without a manifest is none: its save has not ended.
    """
    folders: dict[Location, None] = {}
    for root in roots:
        runs = _folders_in(root)
        folders.update(dict.fromkeys([root, *runs, *(folder for run in runs for folder in _folders_in(run))]))
    found = [Found(folder) for folder in folders if _is_candidate(folder)]
    return sorted(found, key=lambda one: one.time, reverse=True)


def candidates(work_dir: Location, roots: Sequence[Location] = ()) -> Iterator[tuple[Location, str | None]]:
    """Yield the checkpoints to resume from, the best one first, each with what is wrong with it, or None.

    The first is the one that the pointer names; then come all others, the newest one first. Checksums of data are
    not compared here. A damaged pointer is yielded like a damaged checkpoint. A bucket has a pointer of its own; of
    what several pointers name, the newest comes first.

    Args:
        work_dir: the work_dir.
        roots: further folders that hold its checkpoints.
    """
    first: list[Found] = []
    for root in (work_dir, *(root for root in roots if isinstance(root, RemotePath))):
        try:
            if (pointed := read_pointer(root, roots)) is not None:
                first.append(Found(pointed))
        except ConfigError as error:
            yield root / POINTER_FILE, str(error)
    if len(first) > 1:
        first.sort(key=lambda one: one.time, reverse=True)
    tried = [one.directory for one in first]
    for directory in tried:
        yield directory, _fault_in(directory) if directory.is_dir() else str(removed(directory))
    for other in find_checkpoints([work_dir, *roots]):
        if other.directory not in tried:
            yield other.directory, _fault_in(other.directory)


def _fault_in(directory: Location) -> str | None:
    try:
        check(directory)
    except ConfigError as error:
        return str(error)
    return None


def _is_candidate(folder: Location) -> bool:
    if isinstance(folder, RemotePath):
        return any(entry.name == MANIFEST_FILE and not entry.is_dir for entry in folder.entries())
    return any(OWN_FILES.fullmatch(path.name) for path in _paths_in(folder))


def _folders_in(folder: Location) -> list[Location]:
    if isinstance(folder, RemotePath):
        return [folder / entry.name for entry in folder.entries() if entry.is_dir and entry.name[0] != "."]
    return [path for path in _paths_in(folder) if path.is_dir() and not path.is_symlink() and path.name[0] != "."]


def _paths_in(folder: Path) -> list[Path]:
    with suppress(OSError):  # not a folder, or a run is removing it just now
        return list(folder.iterdir())
    return []
