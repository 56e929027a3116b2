"""Whether a folder is a checkpoint, and whether its bytes are those that were saved.

This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Callable

from lockstep.checkpoint.files import DAMAGED, MANIFEST_FILE, PlainFile, is_there, open_plainly, require_plain_files
from lockstep.checkpoint.manifest import Block, Manifest, checksum_of, read_manifest
from lockstep.errors import CheckpointError, ConfigError
from lockstep.location import Location


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


def fault_found_by(examine: Callable[..., object], directory: Location, *share: int) -> str | None:
    """Return what `check` or `verify` finds wrong with a checkpoint; None if it is nothing."""
    try:
        examine(directory, *share)
    except (ConfigError, OSError) as error:
        return str(error)
    return None


def verify(directory: Location, share: int = 0, shares: int = 1) -> int:
    """Compare the bytes of a checkpoint with their checksums, and return how many were compared.

    Args:
        directory: the checkpoint.
        share: which part of it, from 0 on; ranks verify a part each.
        shares: number of parts.

    Raises:
        ConfigError: a checksum differs, or something else is wrong; the message names the file.
    """
    blocks = sorted(check(directory).blocks(), key=lambda block: (block.file, block.start, block.size))
    own = blocks[len(blocks) * share // shares : len(blocks) * (share + 1) // shares]
    buffer = memoryview(bytearray(max((block.size for block in own), default=0)))
    for name in sorted({block.file for block in own}):
        with open_plainly(directory / name) as file:
            for block in own:
                if block.file == name:
                    read_block(file, block, buffer[: block.size])
    return sum(block.size for block in own)


def read_block(file: PlainFile, block: Block, into: memoryview) -> None:
    """Read a block of a file that `open_plainly` has opened into memory of its size.

    Raises:
        CheckpointError: the bytes do not have its checksum.
    """
    file.seek(block.start)
    if file.readinto(into) < block.size or checksum_of(into) != block.crc32:
        raise CheckpointError(
            f"{file.name} has wrong bytes between {block.start} and {block.start + block.size}: they do not have the "
            f"checksum that they were saved with. {DAMAGED}"
        )
