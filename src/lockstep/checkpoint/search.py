"""Which checkpoints there are in a folder, the newest first, and whether they are whole.

This module does not import torch.
"""

from __future__ import annotations

import itertools
import os
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
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
    require_plain_file,
    require_plain_files,
)
from lockstep.checkpoint.manifest import OWN_FILES, Block, Manifest, contradiction, read_manifest
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

    No manifest is opened: the newest one is that whose manifest was written last, as its folder says. Links to folders
    are not followed. In a bucket, a folder without a manifest is none: its save has not ended.

    **Cost**: a look at each folder's manifest, and a listing of each folder that has none.
    """
    found: dict[Location, float] = {}
    level = list(roots)
    for depth in range(3):
        times = {folder: _modified(folder) for folder in level if folder not in found}
        found.update((folder, time) for folder, time in times.items() if time is not None)
        if depth < 2:
            level = [inner for folder, time in times.items() if time is None for inner in _folders_in(folder)]
    ordered = sorted(found, key=lambda folder: (found[folder], _by_numbers(folder.name)), reverse=True)
    return [CheckpointFolder(folder) for folder in ordered]


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
    ends = list(itertools.accumulate((file.size for file in manifest.files.values()), initial=0))
    first, last = ends[-1] * share // shares, ends[-1] * (share + 1) // shares
    compared = 0
    for number, (begin, end) in enumerate(itertools.pairwise(ends)):
        if begin >= last or end <= first:
            continue
        with closing(OpenFile(directory, manifest, number)) as file:
            blocks = manifest.blocks_of(number, file.layout, file.checksums)
            own = [block for block in blocks if first <= begin + block.start < last and block.size]
            buffer = memoryview(bytearray(max((block.size for block in own), default=0)))
            for block in own:
                read_block(file.file, block, buffer[: block.size])
        compared += sum(block.size for block in own)
    return compared


class OpenFile:
    """An open file of a checkpoint, of which it has been checked that it is what the manifest says, with its checksums.

    Args:
        directory: the checkpoint.
        manifest: its manifest.
        number: the number of the file.

    Attributes:
        layout: where the parts lie in it.
        checksums: those of its blocks.
        file: the file.

    Raises:
        CheckpointError: the manifest contradicts itself, or the checksums are damaged.
    """

    def __init__(self, directory: Location, manifest: Manifest, number: int) -> None:
        name = manifest.file_names[number]
        try:
            self.layout = manifest.layout_of(number)
        except ValueError as error:
            raise contradiction(directory / MANIFEST_FILE, error) from error
        size, block = manifest.files[name].size, manifest.last_block(number)
        require_plain_file(directory / name, size)
        self.file = open_plainly(directory / name, size)
        buffer = bytearray(block.size)
        try:
            read_block(self.file, block, memoryview(buffer))
        except BaseException:
            self.file.close()
            raise
        self.checksums = bytes(buffer)

    def close(self) -> None:
        """Close the file."""
        self.file.close()


def read_block(file: PlainFile, block: Block, into: memoryview) -> None:
    """Read a block into `into`, which has the block's size.

    Raises:
        CheckpointError: the bytes do not have its checksum.
    """
    file.seek(block.start)
    if file.readinto(into) < block.size or zlib.crc32(into) != block.crc32:
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


def _modified(folder: Location) -> float | None:
    """Return when a checkpoint's manifest, or what is left of one without, was written; None for no checkpoint."""
    try:
        return modified(folder / MANIFEST_FILE)
    except OSError as error:
        if isinstance(folder, RemotePath) and not isinstance(error, FileNotFoundError):
            raise
    with suppress(OSError):  # not a folder, or a run is removing it just now
        if isinstance(folder, Path) and any(OWN_FILES.fullmatch(name) for name in os.listdir(folder)):
            return modified(folder)
    return None


def _by_numbers(name: str) -> list[int | str]:
    """Return a key by which `epoch_10` comes after `epoch_9`."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", name)]


def _folders_in(folder: Location) -> list[Location]:
    if isinstance(folder, RemotePath):
        return [folder / entry.name for entry in folder.entries() if entry.is_dir and entry.name[0] != "."]
    with suppress(OSError), os.scandir(folder) as entries:  # not a folder, or a run is removing it just now
        return [folder / one.name for one in entries if one.is_dir(follow_symlinks=False) and one.name[0] != "."]
    return []
