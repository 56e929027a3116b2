"""A checkpoint as a folder on a disk: written as a draft, published, removed.

Each step lasts (files and folders are flushed to the disk before the next one), and after each the disk holds a
complete checkpoint if it held one before. What a process leaves behind when it is killed is a draft: a folder whose
name says which process made it, so that a later run can tell that nobody needs it any more. This module does not import
torch.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, suppress
from pathlib import Path

from lockstep.checkpoint.files import MANIFEST_FILE, sync_folder, write_durably
from lockstep.checkpoint.hold import Claim
from lockstep.checkpoint.manifest import OWN_FILES, ending_beside
from lockstep.checkpoint.owner import DRAFT, is_alive, name_of_draft
from lockstep.checkpoint.pointer import POINTER_FILE

_SECONDS_UNTIL_ABANDONED = 3600  # of a draft whose owner can't be asked, because it is on another host


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
        self.ending = ending_beside(path.name for path in directory.glob("rank_*"))

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
            sync_folder(directory.parent.parent)  # it may be new itself
            return
        with closing(Claim(directory)) as former:
            for name in sorted(sizes):
                (draft / name).rename(directory / name)
            sync_folder(directory)
            (draft / MANIFEST_FILE).rename(directory / MANIFEST_FILE)
            sync_folder(directory)
            if former.is_granted():  # else the next save of this name removes what is read now
                for path in directory.iterdir():
                    if path.name not in {*sizes, MANIFEST_FILE} and OWN_FILES.fullmatch(path.name):
                        path.unlink()
        draft.rmdir()

    def discard(self) -> None:
        """Remove the draft of a save that has failed."""
        discard(self.folder)


def remove(directory: Path) -> bool:
    """Remove a checkpoint; if this is interrupted, it is left as a draft.

    Returns:
        Whether it is gone; False if another process reads it now.
    """
    with closing(Claim(directory)) as claim:
        if not claim.is_granted():
            return False
        draft = directory.with_name(name_of_draft(directory.name))
        try:
            directory.rename(draft)
        except FileNotFoundError:  # another run has removed it
            return True
    shutil.rmtree(draft)
    return True


def drafts_in(root: Path) -> Iterator[Path]:
    """Yield the drafts in a folder and in the folders in it."""
    for path in (*root.glob(".*.draft*"), *root.glob("*/.*.draft*")):
        if DRAFT.fullmatch(path.name) and path.is_dir() and not path.is_symlink():
            yield path


def is_owned(draft: Path) -> bool:
    """Return whether the process that made a draft may still need it."""
    owner = DRAFT.fullmatch(draft.name)
    if owner is None:
        return False
    if (alive := is_alive(owner)) is not None:
        return alive
    with suppress(OSError):
        files = draft.iterdir() if draft.is_dir() else ()
        newest: float = max(path.lstat().st_mtime for path in (draft, *files))
        return time.time() - newest < _SECONDS_UNTIL_ABANDONED
    return False


def discard(draft: Path) -> None:
    """Remove a draft."""
    shutil.rmtree(draft, ignore_errors=True)


def remove_dead_pointers(root: Path) -> None:
    """Remove the drafts of pointers that processes have left which have ended."""
    for draft in root.glob(f".{POINTER_FILE}.draft*"):
        if DRAFT.fullmatch(draft.name) and draft.is_file() and not is_owned(draft):
            draft.unlink(missing_ok=True)
