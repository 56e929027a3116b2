"""Checkpoints that are being written or removed, on a disk or in a bucket: which of the two is decided here.

This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

from lockstep.checkpoint import bucket, folder
from lockstep.location import Location

Draft: TypeAlias = folder.FolderDraft | bucket.BucketDraft


def make_draft(directory: Location) -> Draft:
    """Begin to write a checkpoint, to which `directory` will lead."""
    return folder.FolderDraft(directory) if isinstance(directory, Path) else bucket.BucketDraft(directory)


def remove(directory: Location) -> bool:
    """Remove a checkpoint; if this is interrupted, what is left is a draft.

    Returns:
        Whether it is gone; False if, on a disk, another process reads it now.
    """
    return folder.remove(directory) if isinstance(directory, Path) else bucket.remove(directory)


def remove_dead_drafts(roots: Sequence[Location]) -> list[Location]:
    """Remove the drafts in these folders, and in folders in them, whose owners have ended; return them.

    A draft of another host is removed if nothing was written to it for an hour, in a bucket for a day.
    """
    removed = []
    for root in roots:
        if isinstance(root, Path):
            folder.remove_dead_pointers(root)
        for draft in drafts_in(root):
            if not is_owned(draft):
                if isinstance(draft, Path):
                    folder.discard(draft)
                else:
                    bucket.discard(draft)
                removed.append(draft)
    return removed


def drafts_in(root: Location) -> Iterator[Location]:
    """Yield the drafts in a folder and in the folders in it."""
    return folder.drafts_in(root) if isinstance(root, Path) else bucket.drafts_in(root)


def is_owned(draft: Location) -> bool:
    """Return whether the process that made a draft may still need it."""
    return folder.is_owned(draft) if isinstance(draft, Path) else bucket.is_owned(draft)


def folder_of(draft: Location) -> Location:
    """Return the folder in which the files of a draft are."""
    return draft if isinstance(draft, Path) else bucket.marked_by(draft)
