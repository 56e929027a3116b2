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

__all__ = [
    "find_last_checkpoint",
    "is_checkpoint",
    "load_state",
    "point_to_checkpoint",
    "read_meta",
    "read_shapes",
    "save_state",
]
