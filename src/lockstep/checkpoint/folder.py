"""A checkpoint as a folder: drafts and their owners, publishing, removing, and the pointer to the last one.

Each step lasts (files and folders are flushed to the disk before the next one), and after each the disk holds a
complete checkpoint if it held one before. What a process leaves behind when it is killed is a draft: a folder whose
name says which process made it, so that a later run can tell that nobody needs it any more. This module does not import
torch.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from lockstep.checkpoint.manifest import MANIFEST_FILE, read_plain_file
from lockstep.errors import ConfigError

POINTER_FILE = "last_checkpoint"  # in the work_dir, holds the path of the newest checkpoint
_DRAFT = re.compile(r"\.(?P<name>.+)\.draft(\.(?P<pid>\d+)\.(?P<began>\d+)\.(?P<host>.+))?")
_OWN_FILES = re.compile(r"rank_\d+(\.\d+)?\.safetensors|manifest\.json|meta\.json|\.metadata|__\d+_\d+\.distcp")
_SECONDS_UNTIL_ABANDONED = 3600  # of a draft whose owner can't be asked, because it is on another host


def make_draft(directory: Path) -> Path:
    """Create the folder in which a checkpoint is written before it gets its name.

    Args:
        directory: the name that it will get.
    """
    draft = directory.with_name(f".{directory.name}.draft.{os.getpid()}.{_start_of(os.getpid())}.{_host()}")
    shutil.rmtree(draft, ignore_errors=True)  # left by an earlier save of this process that failed
    draft.mkdir(parents=True)
    return draft


def file_ending(directory: Path) -> str:
    """Return the end of the names of data files, which differs from those that `directory` already has."""
    number = 1
    while any(directory.glob(f"rank_*{_ending(number)}")):
        number += 1
    return _ending(number)


def publish(draft: Path, directory: Path, manifest: bytes) -> None:
    """Give a complete draft its final name, or let it take the place of the checkpoint that has the name.

    At each moment a checkpoint that was there is complete, or the new one is: its files are added beside the old ones,
    then its manifest replaces the old one, and at last the old files are removed.
    """
    write_durably(draft / MANIFEST_FILE, manifest)
    sync_folder(draft)
    if not directory.exists():
        draft.rename(directory)
        sync_folder(directory.parent)
        sync_folder(directory.parent.parent)  # it may be new itself
        return
    new = {path.name for path in draft.iterdir()}
    for name in sorted(new - {MANIFEST_FILE}):
        (draft / name).rename(directory / name)
    sync_folder(directory)
    (draft / MANIFEST_FILE).rename(directory / MANIFEST_FILE)
    sync_folder(directory)
    for path in directory.iterdir():
        if path.name not in new and _OWN_FILES.fullmatch(path.name):
            path.unlink()
    draft.rmdir()


def remove(directory: Path) -> None:
    """Remove a checkpoint; if this is interrupted, it is left as a draft."""
    draft = directory.with_name(f".{directory.name}.draft.{os.getpid()}.{_start_of(os.getpid())}.{_host()}")
    directory.rename(draft)
    shutil.rmtree(draft)


def remove_dead_drafts(roots: Sequence[Path]) -> list[Path]:
    """Remove the drafts in these folders, and in folders in them, whose owners have ended; return them.

    A draft of another host is removed if nothing was written to it for an hour.
    """
    removed = []
    for root in roots:
        for draft in drafts_in(root):
            if not is_owned(draft):
                shutil.rmtree(draft, ignore_errors=True)
                removed.append(draft)
    return removed


def drafts_in(root: Path) -> Iterator[Path]:
    """Yield the drafts in a folder and in the folders in it."""
    for path in (*root.glob(".*.draft*"), *root.glob("*/.*.draft*")):
        if _DRAFT.fullmatch(path.name) and path.is_dir() and not path.is_symlink():
            yield path


def is_owned(draft: Path) -> bool:
    """Return whether the process that made a draft may still need it."""
    owner = _DRAFT.fullmatch(draft.name)
    if owner is None:
        return False
    if owner["pid"] is not None and owner["host"] == _host():
        return _start_of(int(owner["pid"])) == owner["began"]
    with suppress(OSError):
        newest = max(path.lstat().st_mtime for path in (draft, *draft.iterdir()))
        return time.time() - newest < _SECONDS_UNTIL_ABANDONED
    return False


def point_to_checkpoint(work_dir: Path, directory: Path) -> None:
    """Make `directory` the last checkpoint of `work_dir`. Rank 0 calls this after saving.

    The path is stored relative to the work_dir, which may therefore be moved; a second line has its digest.
    """
    line = os.path.relpath(directory, work_dir)
    draft = work_dir / f".{POINTER_FILE}.draft"
    write_durably(draft, f"{line}\nsha256 {_digest_of(line)}\n".encode())
    draft.replace(work_dir / POINTER_FILE)
    sync_folder(work_dir)


def read_pointer(work_dir: Path, roots: Sequence[Path] = ()) -> Path | None:
    """Return what the pointer of `work_dir` points to; None if there is no pointer.

    Args:
        work_dir: the folder.
        roots: further folders that it may lead to.

    Raises:
        ConfigError: the pointer is damaged, or leads elsewhere.
    """
    pointer = work_dir / POINTER_FILE
    if not os.path.lexists(pointer):
        return None
    data = read_plain_file(pointer)
    try:
        text = data.decode()
    except ValueError:
        text = ""
    line, newline, rest = text.partition("\n")
    is_whole = rest in ("", f"sha256 {_digest_of(line)}\n") and not re.search(r"sha256 [0-9a-f]{64}$", line)
    if not line or not newline or not is_whole:
        raise ConfigError(f"{pointer} must hold the path of a checkpoint and its digest, but is damaged. Remove it")
    directory = Path(os.path.normpath(work_dir / line))
    if not any(_leads_into(directory, root) for root in (work_dir, *roots)):
        raise ConfigError(
            f"{pointer} must lead to a checkpoint in {work_dir}, but leads out of it, to {line}. To resume from there, "
            "name it by `load_from`; if checkpoints are written there, by the `out_dir` of CheckpointHook"
        )
    return directory


def write_durably(path: Path, data: bytes) -> None:
    """Write a file, and wait until the disk has it."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Wait until the disk has the names in a folder."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _ending(number: int) -> str:
    return ".safetensors" if number == 1 else f".{number}.safetensors"


def _leads_into(path: Path, root: Path) -> bool:
    inside = Path(os.path.normpath(root))
    return path.is_relative_to(inside) and path.resolve().is_relative_to(inside.resolve())


def _digest_of(line: str) -> str:
    return hashlib.sha256(line.encode()).hexdigest()


def _host() -> str:
    return re.sub(r"[^\w.\-]", "_", socket.gethostname())[:100]


def _start_of(pid: int) -> str | None:
    """Return when a process began, in ticks since the start of the system, to tell it from another of its number.

    None if there is no such process; "0" where the system does not say when it began.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(") ")[2].split()
    except FileNotFoundError:
        if Path("/proc/self").exists():
            return None
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return None
        except OSError:
            pass
        return "0"
    except OSError:
        return None
    state, began = fields[0], fields[19]
    return None if state in "ZX" else began  # dead, but not yet collected by its parent
