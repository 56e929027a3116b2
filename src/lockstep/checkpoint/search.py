"""Which checkpoints there are in a folder: the last one, which the pointer names, and all others, the newest first.

The pointer is a file in the work_dir, or in a bucket in the folder that holds the folders of runs. This module does not
import torch.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath

from lockstep.checkpoint.drafts import name_of_draft
from lockstep.checkpoint.files import (
    DAMAGED,
    MANIFEST_FILE,
    POINTER_FILE,
    is_there,
    modified,
    read_plain_file,
    removed,
    sync_folder,
    write_durably,
)
from lockstep.checkpoint.manifest import OWN_FILES, Manifest, read_manifest
from lockstep.checkpoint.verifying import check, fault_found_by
from lockstep.errors import CheckpointError, ConfigError
from lockstep.location import Location, RemotePath
from lockstep.masking import printable

_MOST_BYTES = 2048  # of the pointer: after the path of the work_dir, the one in it must not be too long for Linux
_MOST_NAME = 255  # bytes of a folder's name


def find_checkpoints(roots: Sequence[Location]) -> list[Location]:
    """Return the checkpoints among these folders, the folders in them and those in these, the newest one first.

    No manifest is opened: the newest one is that whose manifest was written last, as its folder says. Links to folders
    are not followed. In a bucket, a folder without a manifest is none: its save has not ended.

    **Cost**: a look at each folder's manifest, and a listing of each folder that has none.
    """
    found: dict[Location, float] = {}
    level = list(roots)
    for depth in range(3):
        times = {folder: _time_of(folder) for folder in level if folder not in found}
        found.update((folder, time) for folder, time in times.items() if time is not None)
        if depth < 2:
            level = [inner for folder, time in times.items() if time is None for inner in _folders_in(folder)]
    return sorted(found, key=lambda folder: (found[folder], _by_numbers(folder.name)), reverse=True)


def nearest_to(path: Location) -> Location | None:
    """Return the checkpoint that is probably meant by a path that leads to none, if it is in the folder of a run.

    Beside a path that does not exist, it is the one of its name, which may end in `.pth`, as MMEngine writes one into
    the work_dir; in a folder, it is the newest one.
    """
    if not isinstance(path, Path):  # to list a bucket takes long
        return None
    name = None if path.exists() else path.name.removesuffix(".pth")
    found = find_checkpoints([path if name is None else path.parent])
    return next((one for one in found if name in (None, one.name) and is_checkpoint(one)), None)


def candidates(work_dir: Location, roots: Sequence[Location] = ()) -> Iterator[tuple[Location, str | None]]:
    """Yield the checkpoints to resume from, the best one first, each with what is wrong with it, or None.

    The first is the one that the pointer names; then come all others, the newest one first. Checksums of data are
    not compared here. A damaged pointer is yielded like a damaged checkpoint. A bucket has a pointer of its own; of
    what several pointers name, the newest comes first.

    Args:
        work_dir: the work_dir.
        roots: further folders that hold its checkpoints.
    """
    tried: list[Location] = []
    for root in (work_dir, *(root for root in roots if isinstance(root, RemotePath))):
        try:
            if (pointed := read_pointer(root, roots)) is not None:
                tried.append(pointed)
        except ConfigError as error:
            yield root / POINTER_FILE, str(error)
    if len(tried) > 1:
        tried.sort(key=written_at, reverse=True)
    for directory in tried:
        yield directory, fault_found_by(check, directory) if is_there(directory) else str(removed(directory))
    # By what they say themselves: a copy of a folder has other times of its files.
    others = [directory for directory in find_checkpoints([work_dir, *roots]) if directory not in tried]
    for directory in sorted(others, key=written_at, reverse=True):
        yield directory, fault_found_by(check, directory)


def find_last_checkpoint(work_dir: Location) -> Location | None:
    """Return the checkpoint that the pointer of `work_dir` names, or None if there is none or it is not complete.

    Raises:
        ConfigError: the pointer is damaged, or leads out of the work_dir.
    """
    directory = read_pointer(work_dir)
    return directory if directory is not None and is_checkpoint(directory) else None


def is_checkpoint(directory: Location) -> bool:
    """Return whether the directory is a complete checkpoint, as far as names of files can tell."""
    return (directory / MANIFEST_FILE).is_file()


def readable_manifest(directory: Location) -> Manifest | None:
    """Return the manifest of a checkpoint; None if it is missing or damaged."""
    with suppress(ConfigError):
        return read_manifest(directory)
    return None


def written_at(directory: Location) -> float:
    """Return when a checkpoint, or what is left of one, was written, in seconds since 1970; 0 if there is none."""
    if (manifest := readable_manifest(directory)) is not None:
        return float(manifest.written["time"])
    with suppress(OSError):  # a run is removing it just now
        return max((modified(path) for path in directory.iterdir()), default=0.0)
    return 0.0


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
        with suppress(OSError):
            draft.unlink(missing_ok=True)
        raise
    sync_folder(root)


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
    try:
        data = read_plain_file(pointer, most=_MOST_BYTES)
    except CheckpointError as error:
        raise ConfigError(str(error).replace(DAMAGED, "It names no checkpoint. Remove it")) from error
    line = data.partition(b"\n")[0].decode(errors="replace")
    is_path = max(len(part.encode()) for part in line.split("/")) <= _MOST_NAME and line == printable(line)
    if not line or not is_path or data != _content(line):
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
    """Return the content of a pointer: a path, and its digest."""
    return f"{line}\nsha256 {hashlib.sha256(line.encode()).hexdigest()}\n".encode()


def _leads_into(path: Path, root: Path) -> bool:
    inside = Path(os.path.normpath(root))
    try:
        return path.is_relative_to(inside) and path.resolve().is_relative_to(inside.resolve())
    except (OSError, RuntimeError):  # links that lead to one another
        return False


def _time_of(folder: Location) -> float | None:
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
