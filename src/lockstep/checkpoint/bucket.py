"""A checkpoint as a folder of objects in a bucket: written, published, removed.

In a bucket nothing can be renamed, but each object appears as a whole. So the files are written where they stay, and
the manifest comes last: a folder is a checkpoint when it has a manifest. A checkpoint of the same name is replaced when
its manifest is; the new files have other names than the old ones, which are removed afterwards.

What a process leaves behind when it is killed are files that no manifest names. To tell them from a save that is in
progress, an empty object is there before the first file and until the end: the mark, `.NAME.draft.PID.BEGAN.HOST`
beside the folder NAME. Only where there is a mark files are removed, and never those that a manifest names. This module
does not import torch.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress

from lockstep.checkpoint.files import MANIFEST_FILE, sizes_in
from lockstep.checkpoint.manifest import OWN_FILES, ending_beside, read_manifest
from lockstep.checkpoint.owner import DRAFT, is_alive, name_of_draft
from lockstep.errors import ConfigError
from lockstep.location import RemotePath, unlink_all

# Of a mark whose owner can't be asked, because it is on another host. Nothing is to be seen of a file until all of it
# has been sent, so that a slow save leaves no other trace of life for long.
_SECONDS_UNTIL_ABANDONED = 24 * 3600


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
        self._mark = _mark(directory)
        self.ending = ending_beside(_names_in(directory))

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


def remove(directory: RemotePath) -> bool:
    """Remove a checkpoint, also from who reads it; if this is interrupted, a mark leads to what is left."""
    mark = _mark(directory)
    if MANIFEST_FILE in _names_in(directory):
        (directory / MANIFEST_FILE).unlink()
    unlink_all(directory.files())
    mark.unlink()
    return True


def drafts_in(root: RemotePath) -> Iterator[RemotePath]:
    """Yield the marks in a folder and in the folders in it."""
    for entry in root.entries():
        if entry.is_dir:
            names = _names_in(root / entry.name)
            yield from (root / entry.name / name for name in names if DRAFT.fullmatch(name))
        elif DRAFT.fullmatch(entry.name):
            yield root / entry.name


def is_owned(mark: RemotePath) -> bool:
    """Return whether a process may still need what the mark, or another one of the same checkpoint, leads to."""
    directory = marked_by(mark)
    others = ((mark.parent / name, DRAFT.fullmatch(name)) for name in _names_in(mark.parent))
    for path, owner in others:
        if owner is not None and owner["name"] == directory.name:
            alive = is_alive(owner)
            if alive or (alive is None and _is_young(path)):
                return True
    return False


def discard(mark: RemotePath) -> None:
    """Remove the files that a mark leads to, unless the manifest names them; and the mark. Go on where that fails."""
    directory = marked_by(mark)
    with suppress(OSError):
        if MANIFEST_FILE not in _names_in(directory):
            _remove_all_but(directory, ())
        else:
            with suppress(ConfigError):  # of a damaged manifest nobody knows what it names
                _remove_all_but(directory, read_manifest(directory).files)
        mark.unlink()


def marked_by(mark: RemotePath) -> RemotePath:
    """Return the folder of the checkpoint that a mark is for."""
    owner = DRAFT.fullmatch(mark.name)
    assert owner is not None, "marks have such names"
    return mark.parent / owner["name"]


def _mark(directory: RemotePath) -> RemotePath:
    mark = directory.parent / name_of_draft(directory.name)
    mark.write_bytes(b"")
    return mark


def _is_young(mark: RemotePath) -> bool:
    directory = marked_by(mark)
    try:
        newest = max(path.modified() for path in (mark, *(directory / name for name in _names_in(directory))))
    except FileNotFoundError:  # somebody is at work
        return True
    return time.time() - newest < _SECONDS_UNTIL_ABANDONED


def _remove_all_but(directory: RemotePath, kept: Collection[str]) -> None:
    names = [name for name in _names_in(directory) if OWN_FILES.fullmatch(name)]
    unlink_all(directory / name for name in names if name not in kept and name != MANIFEST_FILE)


def _names_in(folder: RemotePath) -> list[str]:
    return [entry.name for entry in folder.entries() if not entry.is_dir]
