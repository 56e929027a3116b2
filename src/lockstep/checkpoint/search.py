"""Which checkpoints there are in a folder, the newest first, and whether they are whole.

This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from lockstep.checkpoint.files import (
    DAMAGED,
    MANIFEST_FILE,
    POINTER_FILE,
    PlainFile,
    is_there,
    modified,
    open_plainly,
    removed,
    require_plain_files,
)
from lockstep.checkpoint.manifest import OWN_FILES, Block, Manifest, checksum_of, read_manifest
from lockstep.checkpoint.pointer import read_pointer
from lockstep.checkpoint.values import check_resumable_form
from lockstep.errors import CheckpointError, ConfigError
from lockstep.location import Location, RemotePath
from lockstep.masking import printable


@dataclass(frozen=True)
class CheckpointFolder:
    """A folder that is a checkpoint, or what is left of one.

    Attributes:
        directory: the folder.
    """

    directory: Location

    @cached_property
    def manifest(self) -> Manifest | None:
        """The contents of its manifest; None if it is missing or unreadable."""
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
    return CheckpointFolder(directory).time


def find_last_checkpoint(work_dir: Location) -> Location | None:
    """Return the checkpoint that the pointer of `work_dir` names, or None if there is none or it is not complete.

    Raises:
        ConfigError: the pointer is damaged, or leads out of the work_dir.
    """
    directory = read_pointer(work_dir)
    return directory if directory is not None and is_checkpoint(directory) else None


def find_checkpoints(roots: Sequence[Location]) -> list[CheckpointFolder]:
    """Return the checkpoints among these folders, the folders in them and those in these, the newest one first.

    Links to folders are not followed. In a bucket, a folder without a manifest is none: its save has not ended.
    """
    folders: dict[Location, None] = {}
    for root in roots:
        runs = _folders_in(root)
        folders.update(dict.fromkeys([root, *runs, *(folder for run in runs for folder in _folders_in(run))]))
    found = [CheckpointFolder(folder) for folder in folders if _is_candidate(folder)]
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
    first: list[CheckpointFolder] = []
    for root in (work_dir, *(root for root in roots if isinstance(root, RemotePath))):
        try:
            if (pointed := read_pointer(root, roots)) is not None:
                first.append(CheckpointFolder(pointed))
        except ConfigError as error:
            yield root / POINTER_FILE, str(error)
    if len(first) > 1:
        first.sort(key=lambda one: one.time, reverse=True)
    tried = [one.directory for one in first]
    for directory in tried:
        yield directory, fault_found_by(check, directory) if directory.is_dir() else str(removed(directory))
    for other in find_checkpoints([work_dir, *roots]):
        if other.directory not in tried:
            yield other.directory, fault_found_by(check, other.directory)


def is_checkpoint(directory: Location) -> bool:
    """Return whether the directory is a complete checkpoint, as far as names of files can tell."""
    return (directory / MANIFEST_FILE).is_file()


def require_checkpoint(directory: Location) -> None:
    """Check that a folder is a checkpoint.

    Raises:
        ConfigError: it is not.
    """
    if not is_there(directory / MANIFEST_FILE):
        what = "has none" if directory.is_dir() else "does not exist"
        if directory.is_file():
            what = "is a file. Weights alone are loaded by `load_from` with resume=False"
        raise ConfigError(f"a checkpoint must be a directory with {MANIFEST_FILE} in it, but {directory} {what}")


def check(directory: Location) -> Manifest:
    """Check a checkpoint's manifest, and that its files are there in their sizes; return the manifest.

    Raises:
        ConfigError: something is wrong; the message names the file.
    """
    require_checkpoint(directory)
    manifest = read_manifest(directory)
    require_plain_files(directory, {name: file.size for name, file in manifest.files.items()})
    return manifest


def fault_found_by(examine: Callable[[Location], object], directory: Location) -> str | None:
    """Return what `check` or `verify` finds wrong with a checkpoint; None if nothing is wrong."""
    try:
        examine(directory)
    except (ConfigError, OSError) as error:
        return str(error)
    return None


def verify(directory: Location) -> int:
    """Compare all bytes of a checkpoint with their checksums, and return how many there are.

    Raises:
        ConfigError: a checksum differs, or something else is wrong; the message names the file.
    """
    return verify_share(directory, check(directory))


def verify_share(directory: Location, manifest: Manifest, share: int = 0, shares: int = 1) -> int:
    """Compare a part of the bytes of a checkpoint with their checksums, and return how many were compared.

    Args:
        directory: the checkpoint.
        manifest: its manifest.
        share: which part of it, from 0 on; ranks verify a part each.
        shares: number of parts.

    Raises:
        ConfigError: a checksum differs; the message names the file.
    """
    blocks = sorted(manifest.blocks(), key=lambda block: (block.file, block.start, block.size))
    own = blocks[len(blocks) * share // shares : len(blocks) * (share + 1) // shares]
    buffer = memoryview(bytearray(max((block.size for block in own), default=0)))
    for name in sorted({block.file for block in own}):
        with open_plainly(directory / name) as file:
            for block in own:
                if block.file == name:
                    read_block(file, block, buffer[: block.size])
    return sum(block.size for block in own)


def read_block(file: PlainFile, block: Block, into: memoryview) -> None:
    """Read a block into `into`, which has the block's size.

    Raises:
        CheckpointError: the bytes do not have its checksum.
    """
    file.seek(block.start)
    if file.readinto(into) < block.size or checksum_of(into) != block.crc32:
        raise CheckpointError(
            f"{file.name} has wrong bytes between {block.start} and {block.start + block.size}: they do not have the "
            f"checksum that they were saved with. {DAMAGED}"
        )


def check_resumable(directory: Location, manifest: Manifest) -> None:
    """Check that a checkpoint with this manifest has what a run resumes from.

    Raises:
        CheckpointError: it lacks something, or has it in another form.
    """
    try:
        check_resumable_form(manifest.meta, manifest.state)
    except ValueError as error:
        raise CheckpointError(
            f"{directory} must have what a run saves, but {printable(str(error), lines=False)}. Do not resume from it"
        ) from error


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
