"""Whether a checkpoint is whole: its manifest, its files, and all their bytes by their checksums.

This module does not import torch.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from contextlib import closing

from lockstep.checkpoint.files import (
    DAMAGED,
    MANIFEST_FILE,
    PlainFile,
    is_there,
    open_plainly,
    require_plain_file,
    require_plain_files,
)
from lockstep.checkpoint.manifest import Block, Manifest, contradiction, read_manifest
from lockstep.checkpoint.values import check_resumable_form
from lockstep.errors import CheckpointError, ConfigError
from lockstep.location import Location
from lockstep.masking import printable


def require_checkpoint(directory: Location) -> None:
    """Check that a folder is a checkpoint.

    Raises:
        ConfigError: it is not.
    """
    if not is_there(directory / MANIFEST_FILE):
        what = "has none" if directory.is_dir() else "does not exist"
        if directory.is_file():
            what = "is a file. Weights alone are loaded by `load_from`"
        raise ConfigError(f"a checkpoint must be a directory with {MANIFEST_FILE} in it, but {directory} {what}")


def check(directory: Location) -> Manifest:
    """Check a checkpoint's manifest, and that its files are there in their sizes; return the manifest.

    Raises:
        ConfigError: something is wrong; the message names the file.
    """
    require_checkpoint(directory)
    manifest = read_manifest(directory)
    check_files(directory, manifest)
    return manifest


def check_files(directory: Location, manifest: Manifest) -> None:
    """Check that the files of a checkpoint with this manifest are there in their sizes.

    Raises:
        ConfigError: one is not; the message names it.
    """
    require_plain_files(directory, {name: file.size for name, file in manifest.files.items()})


def fault_found_by(examine: Callable[[Location], object], directory: Location) -> str | None:
    """Return what `check` or `verify` finds wrong with a checkpoint; None if nothing is wrong."""
    try:
        examine(directory)
    except (ConfigError, OSError) as error:
        return str(error)
    return None


def verify(directory: Location) -> None:
    """Compare all bytes of a checkpoint with their checksums.

    Raises:
        ConfigError: a checksum differs, or something else is wrong; the message names the file.
    """
    manifest = check(directory)
    for number in range(len(manifest.files)):
        with closing(OpenFile(directory, manifest, number)) as file:
            blocks = list(manifest.blocks_of(number, file.layout, file.checksums))
            buffer = memoryview(bytearray(max(block.size for block in blocks)))
            for block in blocks:
                read_block(file.file, block, buffer[: block.size])


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
