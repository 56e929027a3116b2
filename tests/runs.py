"""Hooks that several rooms' tests watch and end runs with, and changes to what runs have saved."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from lockstep.checkpoint.files import MANIFEST_FILE
from lockstep.checkpoint.manifest import dump_manifest, read_manifest
from lockstep.hooks import Hook

# What a run resumes from must have, of a model alone.
RESUMABLE: dict[str, Any] = {
    "epoch": 0, "iter": 0, "seed": 0, "world_size": 1, "param_schedulers": [], "has_optimizer": False,
    "position": {
        "epoch": 0, "batches": 0, "samples": 0, "unit": "samples", "total": None, "global_batch": None, "head": [],
        "layout": [1, None], "held_by": None,
    },
}  # fmt: skip


class StopAfter(Hook):
    """Ends a run as a crash would: after so many iterations, and what is saved there.

    Args:
        iters: how many; None for never.
    """

    priority = "LOWEST"

    def __init__(self, iters: int | None) -> None:
        self.iters = iters

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None) -> None:
        if runner.iter + 1 == self.iters:
            raise KeyboardInterrupt


class Losses(StopAfter):
    """Notes the loss of every iteration, too."""

    def __init__(self, stop_after: int | None = None) -> None:
        super().__init__(stop_after)
        self.by_iter: dict[int, float] = {}

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None) -> None:
        self.by_iter[runner.iter] = outputs["loss"].item()
        super().after_train_iter(runner, batch_idx, data_batch, outputs)


def change_meta(checkpoint: Path, without: str, **changes: Any) -> None:
    """Rewrite a checkpoint's metadata, as another version would have written it."""
    manifest = read_manifest(checkpoint)
    meta = {key: value for key, value in manifest.meta.items() if key != without}
    (checkpoint / MANIFEST_FILE).write_bytes(dump_manifest(replace(manifest, meta=meta | changes)))
