"""Checkpoints that are being written or removed, on a disk and in a bucket.

**On a disk** a checkpoint is written into a folder of its own, the draft, which gets its name at the end. Each step
lasts (files and folders are flushed to the disk before the next one), and after each the disk holds a complete
checkpoint if it held one before.

**In a bucket** nothing can be renamed, but each object appears as a whole. So the files are written where they stay,
and the manifest comes last: a folder is a checkpoint when it has a manifest. A checkpoint of the same name is replaced
when its manifest is; the new files have other names than the old ones, which are removed afterwards. The mark, an empty
object, is there before the first file and until the end. Files are removed only where there is a mark, and never those
that a manifest names.

A process that is killed leaves its draft or its mark. The name of either, `.NAME.draft.PID.BEGAN.HOST` beside NAME,
says which process made it, so that others can tell if that has ended. HOST is a host since its last boot, or a
container on it. This module does not import torch.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeAlias

from lockstep.checkpoint.files import (
    MANIFEST_FILE,
    POINTER_FILE,
    modified,
    sizes_in,
    sync_folder,
    write_durably,
)
from lockstep.checkpoint.manifest import OWN_FILES, read_manifest, unused_ending
from lockstep.errors import ConfigError
from lockstep.location import Location, RemotePath, unlink_all
from lockstep.topology.pid_namespace import pid_namespace, stat_of

DRAFT = re.compile(r"\.(?P<name>.+)\.draft\.(?P<pid>\d+)\.(?P<began>\d+)\.(?P<host>.+)")
"""Names of drafts and marks."""
# Of a draft whose owner can't be asked: it is on another host, in another container, or from before a reboot, which all
# look alike. In a bucket, nothing is to be seen of a file until all of it has been sent, so that a slow save leaves no
# other trace of life for long.
_SECONDS_UNTIL_ABANDONED = 3600
_SECONDS_UNTIL_ABANDONED_IN_A_BUCKET = 24 * 3600


class FolderDraft:
    """A checkpoint that is being written in a folder of its own, which gets its name at the end.

    Args:
        directory: the name that it will get.

    Attributes:
        folder: where its files are to be written.
        ending: the end of the names of its data files.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.folder = directory.with_name(name_of_draft(directory.name))
        shutil.rmtree(self.folder, ignore_errors=True)  # left by an earlier save of this process that failed
        self.folder.mkdir(parents=True)
        self.ending = unused_ending(path.name for path in directory.glob("rank_*"))

    def publish(self, manifest: bytes, sizes: Mapping[str, int]) -> None:
        """Give the draft its final name, or let it take the place of the checkpoint that has the name.

        At each moment a checkpoint that was there is complete, or the new one is: its files are added beside the old
        ones, then its manifest replaces the old one, and at last the old files are removed.
        """
        draft, directory = self.folder, self._directory
        write_durably(draft / MANIFEST_FILE, manifest)
        sync_folder(draft)
        if not directory.exists():
            draft.rename(directory)
            sync_folder(directory.parent)
            # The folder may be new itself; in one that may not be read, such as /home, it isn't.
            with suppress(PermissionError):
                sync_folder(directory.parent.parent)
            return
        for name in sorted(sizes):
            (draft / name).rename(directory / name)
        sync_folder(directory)
        (draft / MANIFEST_FILE).rename(directory / MANIFEST_FILE)
        sync_folder(directory)
        with suppress(OSError):  # it is complete; the next checkpoint of this name removes what is left
            _remove_all_but(directory, sizes)
            draft.rmdir()

    def discard(self) -> None:
        """Remove the files of a save that has failed."""
        discard(self.folder)


class BucketDraft:
    """A checkpoint that is being written into the folder that it will stay in.

    Args:
        directory: its folder.

    Attributes:
        folder: where its files are to be written.
        ending: the end of the names of its data files.
    """

    def __init__(self, directory: RemotePath) -> None:
        self.folder = directory
        self._mark = _made_mark(directory)
        self.ending = unused_ending(_names_in(directory))

    def publish(self, manifest: bytes, sizes: Mapping[str, int]) -> None:
        """Write the manifest, which makes it a checkpoint, and remove the files of one that had its name.

        Raises:
            OSError: a file is not there any more.
        """
        found = sizes_in(self.folder)
        for name, size in sizes.items():
            if found.get(name) != size:
                raise OSError(
                    f"{self.folder / name} must have {size} bytes, but "
                    f"{f'has {found[name]}' if name in found else 'is not there'}: something else has changed it "
                    "during the save. Let each run have an `out_dir` or a work_dir of its own name"
                )
        (self.folder / MANIFEST_FILE).write_bytes(manifest)
        with suppress(OSError):  # it is complete; the mark leads the next run to what is left
            _remove_all_but(self.folder, sizes)
            self._mark.unlink()

    def discard(self) -> None:
        """Remove the files of a save that has failed; where that fails, too, the next run does it."""
        discard(self._mark)


Draft: TypeAlias = FolderDraft | BucketDraft


def make_draft(directory: Location) -> Draft:
    """Begin to write a checkpoint, to which `directory` will lead."""
    return FolderDraft(directory) if isinstance(directory, Path) else BucketDraft(directory)


def remove(directory: Location) -> None:
    """Remove a checkpoint; if this is interrupted, what is left is a draft or has a mark."""
    if isinstance(directory, RemotePath):
        mark = _made_mark(directory)
        if MANIFEST_FILE in _names_in(directory):
            (directory / MANIFEST_FILE).unlink()
        unlink_all(directory.files())
        mark.unlink()
        return
    draft = directory.with_name(name_of_draft(directory.name))
    with suppress(FileNotFoundError):  # another run has removed it
        directory.rename(draft)
        shutil.rmtree(draft)


def remove_dead_drafts(roots: Sequence[Location]) -> list[Location]:
    """Remove the drafts in these folders, and in folders in them, whose owners have ended; return them.

    One of another host or container, or from before a reboot, is removed if nothing was written to it for an hour, in a
    bucket for a day.
    """
    removed = []
    for root in roots:
        if isinstance(root, Path):
            for pointer in root.glob(f".{POINTER_FILE}.draft*"):
                if DRAFT.fullmatch(pointer.name) and pointer.is_file() and not is_owned(pointer):
                    pointer.unlink(missing_ok=True)
        for draft in drafts_in(root):
            if not is_owned(draft):
                discard(draft)
                removed.append(draft)
    return removed


def drafts_in(root: Location) -> Iterator[Location]:
    """Yield the drafts, or in a bucket the marks, in a folder and in the folders in it."""
    if isinstance(root, Path):
        for path in (*root.glob(".*.draft*"), *root.glob("*/.*.draft*")):
            if DRAFT.fullmatch(path.name) and path.is_dir() and not path.is_symlink():
                yield path
        return
    for entry in root.entries():
        if entry.is_dir:
            names = _names_in(root / entry.name)
            yield from (root / entry.name / name for name in names if DRAFT.fullmatch(name))
        elif DRAFT.fullmatch(entry.name):
            yield root / entry.name


def is_owned(draft: Location) -> bool:
    """Return whether a process may still need a draft, or what a mark, or another one of its checkpoint, leads to."""
    if isinstance(draft, Path):
        return _is_used(draft)
    marks = [draft.parent / name for name in _names_in(draft.parent) if DRAFT.fullmatch(name)]
    return any(_is_used(mark) for mark in marks if _marked_by(mark) == _marked_by(draft))


def folder_of(draft: Location) -> Location:
    """Return the folder in which the files of a draft are, or that of the checkpoint that a mark is for."""
    return draft if isinstance(draft, Path) else _marked_by(draft)


def discard(draft: Location) -> None:
    """Remove a draft or a mark, and the files that it has led to, unless a manifest names them. Do what can be done."""
    directory = _marked_by(draft)
    if isinstance(draft, Path):
        with suppress(OSError, ConfigError):
            _remove_all_but(directory, read_manifest(directory).files)
        shutil.rmtree(draft, ignore_errors=True)
        return
    with suppress(OSError):
        if MANIFEST_FILE not in _names_in(directory):
            _remove_all_but(directory, ())
        else:
            with suppress(ConfigError):  # of a damaged manifest nobody knows what it names
                _remove_all_but(directory, read_manifest(directory).files)
        draft.unlink()


def name_of_draft(name: str) -> str:
    """Return the name of the draft that this process makes of a checkpoint, or of another file or folder."""
    return f".{name}.draft.{os.getpid()}.{_start_of(os.getpid()) or 0}.{_host()}"


def is_alive(draft: re.Match[str]) -> bool | None:
    """Return whether the process that made a draft is alive; None if it can't be asked: elsewhere, or on macOS."""
    can_be_asked = draft["host"] == _host() and draft["began"] != "0"
    return _start_of(int(draft["pid"])) == draft["began"] if can_be_asked else None


def _is_used(draft: Location) -> bool:
    owner = DRAFT.fullmatch(draft.name)
    alive = False if owner is None else is_alive(owner)
    return _is_young(draft) if alive is None else alive


def _is_young(draft: Location) -> bool:
    """Return whether something was written to a draft, or beside a mark, not long ago."""
    try:
        if isinstance(draft, Path):
            files = list(draft.iterdir()) if draft.is_dir() else []
            return time.time() - max(map(modified, (draft, *files))) < _SECONDS_UNTIL_ABANDONED
        folder = _marked_by(draft)
        newest = max(map(modified, (draft, *(folder / name for name in _names_in(folder)))))
        return time.time() - newest < _SECONDS_UNTIL_ABANDONED_IN_A_BUCKET
    except OSError as error:  # somebody removes it just now
        if isinstance(draft, RemotePath) and not isinstance(error, FileNotFoundError):
            raise
        return isinstance(draft, RemotePath)


def _made_mark(directory: RemotePath) -> RemotePath:
    mark = directory.parent / name_of_draft(directory.name)
    mark.write_bytes(b"")
    return mark


def _marked_by(draft: Location) -> Location:
    owner = DRAFT.fullmatch(draft.name)
    assert owner is not None, "drafts and marks have such names"
    return draft.parent / owner["name"]


def _remove_all_but(directory: Location, kept: Collection[str]) -> None:
    names = [name for name in _names_in(directory) if OWN_FILES.fullmatch(name)]
    rest = [directory / name for name in names if name not in kept and name != MANIFEST_FILE]
    if isinstance(directory, Path):
        for path in rest:
            path.unlink()
    else:
        unlink_all(rest)


def _names_in(folder: Location) -> list[str]:
    if isinstance(folder, Path):
        return [path.name for path in folder.iterdir() if not path.is_dir()]
    return [entry.name for entry in folder.entries() if not entry.is_dir]


def _host() -> str:
    return re.sub(r"[^\w.\-]", "_", pid_namespace())[:100]


def _start_of(pid: int) -> str | None:
    """Return when a process began, in ticks since the start of the system, to tell it from another of its number.

    None if there is no such process, or if the system does not say when it began.
    """
    stat = stat_of(pid)
    return stat[19] if stat and stat[0] not in "ZX" else None  # such a one is dead, but not yet collected by its parent
