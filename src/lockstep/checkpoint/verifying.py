"""Whether a checkpoint is whole: its manifest, its files, and all their bytes by their checksums.

This module does not import torch.
"""

from __future__ import annotations

import itertools
import struct
import zlib
from collections.abc import Callable
from contextlib import closing
from typing import NamedTuple

from lockstep.checkpoint.files import (
    DAMAGED,
    MANIFEST_FILE,
    PlainFile,
    is_there,
    open_plainly,
    require_plain_file,
    require_plain_files,
)
from lockstep.checkpoint.manifest import CHECKSUM, Manifest, contradiction, read_manifest
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
    for number, stored in enumerate(manifest.files.values()):
        with closing(OpenFile(directory, manifest, number)) as file:  # which has compared the end
            blocks = [Block(0, stored.header, stored.crc32)]
            for place, (first, after) in enumerate(itertools.pairwise(file.layout.blocks)):
                blocks += [file.block(place, i) for i in range(after - first)]
            buffer = memoryview(bytearray(max(block.size for block in blocks)))
            for block in blocks:
                read_block(file.file, block, buffer[: block.size])


class Block(NamedTuple):
    """Bytes of a file with a checksum of their own."""

    start: int
    size: int
    crc32: int


class OpenFile:
    """An open file of a checkpoint, of which it has been checked that it is what the manifest says, with its checksums.

    Args:
        directory: the checkpoint.
        manifest: its manifest.
        number: the number of the file.

    Attributes:
        layout: where the parts lie in it.
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
        stored = manifest.files[name]
        require_plain_file(directory / name, stored.size)
        self.file = open_plainly(directory / name, stored.size)
        checksums = bytearray(CHECKSUM * stored.blocks)  # the end of the file
        end = Block(stored.size - len(checksums), len(checksums), stored.blocks_crc32)
        try:
            read_block(self.file, end, memoryview(checksums))
        except BaseException:
            self.file.close()
            raise
        self._checksums = struct.unpack(f"<{stored.blocks}I", checksums)
        self._block_size = manifest.block

    def block(self, place: int, number: int) -> Block:
        """Return a block of a tensor's part, by the tensor's place in the order of files; the last one may be short."""
        start, end = self.layout.starts[place : place + 2]
        start += number * self._block_size
        return Block(start, min(self._block_size, end - start), self._checksums[self.layout.blocks[place] + number])

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
