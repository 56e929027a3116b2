"""Scalars, images and the config in Weights & Biases."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lockstep.config import Config
from lockstep.config.source_form import plain_data
from lockstep.registry import VISUALIZERS
from lockstep.visualization.files import as_picture
from lockstep.visualization.library import LibraryVisualizer


@VISUALIZERS.register_module(name=["WandbVisualizer", "WandbVisBackend"])
class WandbVisualizer(LibraryVisualizer):
    """Logs to a run of Weights & Biases.

    Args:
        init_kwargs: arguments of `wandb.init`, for example `dict(project="digits", mode="offline")`. By default the
            project has the name of the work_dir, and the run that of its folder.
        save_dir: where wandb keeps its files, by default the run's folder.
    """

    package = "wandb"

    def open(self, run_dir: Path) -> None:
        """Start a run of Weights & Biases."""
        import wandb

        defaults = {"project": run_dir.resolve().parent.name, "name": run_dir.name}
        self._opened = wandb.init(**{**defaults, "dir": str(self._save_dir or run_dir), **self._init_kwargs})

    def add_scalars(self, scalar_dict: dict[str, float], step: int = 0) -> None:
        """Log values; `step` must not decrease."""
        self.opened.log(scalar_dict, step=step)

    def add_image(self, name: str, image: Any, step: int = 0) -> None:
        """Log an image."""
        import wandb

        self.opened.log({name: wandb.Image(as_picture(image).numpy())}, step=step)

    def add_config(self, config: Config) -> None:
        """Log the values of the config."""
        self.opened.config.update(plain_data(config))

    def _end(self, run: Any, *, failed: bool) -> None:
        run.finish(exit_code=int(failed))
