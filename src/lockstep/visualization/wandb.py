"""Scalars, images and the config in Weights & Biases."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lockstep.config import Config
from lockstep.config.source_form import plain_data
from lockstep.registry import VISUALIZERS
from lockstep.visualization.library import opened, require
from lockstep.visualization.png import as_picture


@VISUALIZERS.register_module(name=["WandbVisualizer", "WandbVisBackend"])
class WandbVisualizer:
    """Logs to a run of Weights & Biases.

    Args:
        init_kwargs: arguments of `wandb.init`, for example `dict(project="digits", mode="offline")`. By default the
            project has the name of the work_dir, and the run that of its folder.
        save_dir: where wandb keeps its files, by default the run's folder.
    """

    def __init__(self, init_kwargs: Mapping[str, Any] | None = None, save_dir: str | Path | None = None) -> None:
        require("wandb", "wandb", "WandbVisualizer")
        self._init_kwargs = dict(init_kwargs or {})
        self._save_dir = save_dir
        self._run: Any = None

    def open(self, run_dir: Path) -> None:
        """Start a run of Weights & Biases."""
        import wandb

        defaults = {"project": run_dir.resolve().parent.name, "name": run_dir.name}
        self._run = wandb.init(**{**defaults, "dir": str(self._save_dir or run_dir), **self._init_kwargs})

    def add_scalars(self, scalar_dict: dict[str, float], step: int = 0) -> None:
        """Log values; `step` must not decrease."""
        opened(self._run, self).log(scalar_dict, step=step)

    def add_image(self, name: str, image: Any, step: int = 0) -> None:
        """Log an image."""
        import wandb

        opened(self._run, self).log({name: wandb.Image(as_picture(image).numpy())}, step=step)

    def add_config(self, config: Config) -> None:
        """Log the values of the config."""
        opened(self._run, self).config.update(plain_data(config))

    def close(self) -> None:
        """End the run, as failed if an exception is being handled."""
        if self._run is not None:
            self._run.finish(exit_code=0 if sys.exc_info()[0] is None else 1)
            self._run = None
