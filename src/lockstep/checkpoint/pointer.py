"""The pointer: a file that says which checkpoint is the last one. This module does not import torch.

It lies in the work_dir, or in a bucket in the folder that holds the folders of runs.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from lockstep.checkpoint.drafts import name_of_draft
from lockstep.checkpoint.files import POINTER_FILE, is_there, read_plain_file, sync_folder, write_durably
from lockstep.errors import ConfigError
from lockstep.location import Location, RemotePath
from lockstep.masking import printable

_MOST_BYTES = 2048  # of the file: a path in it must be one with the path of the work_dir before it
_MOST_NAME = 255  # bytes of a folder's name


@contextmanager
def pointing(root: Location, directory: Location) -> Iterator[None]:
    """Make a checkpoint the last one of `root` when the block has ended; no space is needed for it any more by then.

    The path is stored relative to the root, which may therefore be moved; a second line has its digest.

    Args:
        root: the work_dir; for a checkpoint in a bucket, a folder there that it lies in.
        directory: the checkpoint.
    """
    if isinstance(root, RemotePath):
        assert isinstance(directory, RemotePath), "a pointer leads to where it lies itself"
        yield
        (root / POINTER_FILE).write_bytes(_content(str(directory.relative_to(root))))
        return
    draft = root / name_of_draft(POINTER_FILE)  # other runs in this work_dir save, too
    try:
        write_durably(draft, _content(os.path.relpath(str(directory), root)))
        yield
        draft.replace(root / POINTER_FILE)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    sync_folder(root)


def point_to_checkpoint(root: Location, directory: Location) -> None:
    """Make `directory`, a checkpoint, the last one of `root`; see `pointing`."""
    with pointing(root, directory):
        pass


def read_pointer(root: Location, others: Sequence[Location] = ()) -> Location | None:
    """Return what the pointer of `root` points to; None if there is no pointer.

    Args:
        root: the folder.
        others: further folders that it may lead to.

    Raises:
        ConfigError: the pointer is damaged, or leads elsewhere.
    """
    pointer = root / POINTER_FILE
    if not is_there(pointer):
        return None
    data = read_plain_file(pointer, most=_MOST_BYTES)
    try:
        text = data.decode()
    except ValueError:
        text = ""
    line, newline, rest = text.partition("\n")
    is_whole = rest in ("", f"sha256 {_digest_of(line)}\n") and not re.search(r"sha256 [0-9a-f]{64}$", line)
    is_path = max(len(part.encode()) for part in line.split("/")) <= _MOST_NAME and line == printable(line)
    if not line or not newline or not is_whole or not is_path:
        raise ConfigError(f"{pointer} must hold the path of a checkpoint and its digest, but is damaged. Remove it")
    if isinstance(root, RemotePath):
        inner = PurePosixPath(line)
        if not inner.is_absolute() and ".." not in inner.parts and "\\" not in line:
            return root / inner
    else:
        directory = Path(os.path.normpath(root / line))
        if any(_leads_into(directory, other) for other in (root, *others) if isinstance(other, Path)):
            return directory
    raise ConfigError(
        f"{pointer} must lead to a checkpoint in {root}, but leads out of it, to {line}. To resume from there, "
        "name it by `load_from`; if checkpoints are written there, by the `out_dir` of CheckpointHook"
    )


def _content(line: str) -> bytes:
    return f"{line}\nsha256 {_digest_of(line)}\n".encode()


def _digest_of(line: str) -> str:
    return hashlib.sha256(line.encode()).hexdigest()


def _leads_into(path: Path, root: Path) -> bool:
    inside = Path(os.path.normpath(root))
    try:
        return path.is_relative_to(inside) and path.resolve().is_relative_to(inside.resolve())
    except (OSError, RuntimeError):  # links that lead to one another
        return False
