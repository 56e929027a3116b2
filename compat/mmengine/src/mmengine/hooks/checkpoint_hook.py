"""`CheckpointHook`: lockstep's, which can also write each checkpoint as MMEngine's file."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import lockstep.hooks
from lockstep.checkpoint import is_checkpoint
from lockstep.runner.run import TrainRun
from mmengine.hooks.logger_hook import check_local
from mmengine.registry import HOOKS
from mmengine.runner.exporting import export_checkpoint

__all__ = ["CheckpointHook"]

_logger = logging.getLogger(__name__)


@HOOKS.register_module()
@dataclass(eq=False, repr=False)
class CheckpointHook(lockstep.hooks.CheckpointHook):
    """Save the model, the optimizer and the progress of training; see `lockstep.hooks.CheckpointHook`.

    Args:
        interval: by default only the last one is saved, as by MMEngine's.
        by_epoch: the same as there.
        as_files: beside each checkpoint, write a file of its name into the work_dir, as in `epoch_1.pth`, from which
            MMEngine resumes. A file is removed as soon as its checkpoint has been. The file `last_checkpoint` names the
            checkpoint, from which a run here resumes.
        save_param_scheduler: has no effect, because schedules are always saved.
        published_keys: has no effect; `lockstep export CHECKPOINT weights.pth --to torch` writes weights alone.
        file_client_args, backend_args: must be None or name the local backend, because checkpoints are written through
            the file system.

    **Cost**: of `as_files`, rank 0 reads the checkpoint and writes the file, while the others wait.
    """

    interval: int | None = -1
    by_epoch: bool | None = True
    as_files: bool = False
    save_param_scheduler: bool = True
    published_keys: str | Sequence[str] | None = None
    file_client_args: None = None
    backend_args: None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_local("checkpoints", file_client_args=self.file_client_args, backend_args=self.backend_args)
        if self.published_keys is not None:
            _logger.warning(
                "`published_keys` does nothing: no file is written to be published, and those of `as_files` have the "
                "optimizer's state. `lockstep export CHECKPOINT weights.pth --to torch` writes the weights alone"
            )
        self._files: list[str] = []
        self._save_due: Callable[[], None] = lambda: None

    def _save_checkpoint(self, runner: TrainRun) -> None:
        """Save the regular checkpoint that is due; a subclass may do more. Does nothing when none is due."""
        self._save_due()

    def _save(self, runner: TrainRun, *args: Any, **kwargs: Any) -> None:
        self._save_due = partial(super()._save, runner, *args, **kwargs)
        self._save_checkpoint(runner)
        self._save_due = lambda: None

    def _write(self, runner: TrainRun, name: str, when_ended: Callable[[bool], None], **how: Any) -> None:
        def end_with_file(is_complete: bool) -> None:
            when_ended(is_complete)
            if is_complete and self.as_files and runner.rank == 0:
                self._write_file(runner, name)

        super()._write(runner, name, end_with_file, **how)

    def _write_file(self, runner: TrainRun, name: str) -> None:
        file = _file_of(runner, name)
        try:
            export_checkpoint(self._folder(runner) / name, file)
        except OSError as error:
            if self.on_save_error == "raise":
                raise
            _logger.warning("%s could not be written, and training goes on without it: %s", file, error)
        self._files = [*(one for one in self._files if one != name), name]
        for old in [one for one in self._files if not is_checkpoint(self._folder(runner) / one)]:
            _file_of(runner, old).unlink(missing_ok=True)
            self._files.remove(old)


def _file_of(runner: TrainRun, name: str) -> Path:
    return runner.work_dir / f"{name.removesuffix('.pth')}.pth"
