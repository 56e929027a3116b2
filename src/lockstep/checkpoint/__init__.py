"""States on disk: one directory per checkpoint, written atomically."""

from __future__ import annotations

from lockstep.checkpoint.directory import (
    find_last_checkpoint,
    is_checkpoint,
    load_state,
    point_to_checkpoint,
    read_meta,
    read_shapes,
    save_state,
)
from lockstep.checkpoint.reading import read_infos, read_tensors

__all__ = [
    "find_last_checkpoint",
    "is_checkpoint",
    "load_state",
    "point_to_checkpoint",
    "read_infos",
    "read_meta",
    "read_shapes",
    "read_tensors",
    "save_state",
]
