"""Saved states: one directory per checkpoint, in which every byte has a checksum and nothing can be executed.

`manifest.py` says what a checkpoint holds and where; `layout.py` says which rank writes what, `saving.py` writes a
checkpoint, `background.py` does so while the training goes on, `loading.py` reads one. `drafts.py` publishes and
removes, on a disk and in a bucket; `search.py` finds, `verifying.py` verifies; they do without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lockstep.checkpoint.drafts import remove, remove_dead_drafts
from lockstep.checkpoint.search import find_checkpoints, find_last_checkpoint, is_checkpoint
from lockstep.checkpoint.verifying import verify

if TYPE_CHECKING:
    from lockstep.checkpoint.loading import load_state, read_infos, read_meta, read_shapes, read_tensors
    from lockstep.checkpoint.saving import Planner, save_state

_HOMES = {  # these import torch
    "loading": {"load_state", "read_infos", "read_meta", "read_shapes", "read_tensors"},
    "saving": {"Planner", "save_state"},
}

__all__ = [
    "Planner",
    "find_checkpoints",
    "find_last_checkpoint",
    "is_checkpoint",
    "load_state",
    "read_infos",
    "read_meta",
    "read_shapes",
    "read_tensors",
    "remove",
    "remove_dead_drafts",
    "save_state",
    "verify",
]


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{home}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
