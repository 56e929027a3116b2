"""`last_checkpoint`: a file in the work_dir that says where the newest checkpoint is."""

from __future__ import annotations

import os
from pathlib import Path

from lockstep.checkpoint.directory import is_checkpoint

POINTER_FILE = "last_checkpoint"


def point_to_checkpoint(work_dir: Path, directory: Path) -> None:
    """Make `directory` the last checkpoint of `work_dir`. Rank 0 does this, after saving.

    The path is stored relative to the work_dir, which may therefore be moved.
    """
    draft = work_dir / f".{POINTER_FILE}.draft"
    draft.write_text(os.path.relpath(directory, work_dir) + "\n", encoding="utf-8")
    draft.replace(work_dir / POINTER_FILE)


def find_last_checkpoint(work_dir: Path) -> Path | None:
    """Return the last checkpoint of `work_dir`, or None if there is none that is complete."""
    pointer = work_dir / POINTER_FILE
    if not pointer.is_file():
        return None
    directory = work_dir / pointer.read_text(encoding="utf-8").strip()
    return directory if is_checkpoint(directory) else None
