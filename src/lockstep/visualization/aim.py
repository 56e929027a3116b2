"""Scalars, images and the config in Aim."""

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


@VISUALIZERS.register_module(name=["AimVisualizer", "AimVisBackend"])
class AimVisualizer:
    """Tracks a run in an Aim repository.

    Args:
        init_kwargs: arguments of `aim.Run`, for example `dict(repo="aim://server:53800")`. By default the experiment
            has the name of the work_dir, and the output of the terminal, which a run logs itself, is not captured.
        save_dir: the folder of the repository, `.aim`; by default the work_dir, shared by all its runs. Show it with
            `aim up --repo`.
    """

    def __init__(self, init_kwargs: Mapping[str, Any] | None = None, save_dir: str | Path | None = None) -> None:
        require("aim", "aim", "AimVisualizer")
        self._init_kwargs = dict(init_kwargs or {})
        self._save_dir = save_dir
        self._run: Any = None

    def open(self, run_dir: Path) -> None:
        """Start an Aim run with the name of the run's folder."""
        from aim import Run

        work_dir = run_dir.resolve().parent
        defaults = {
            "repo": str(work_dir if self._save_dir is None else self._save_dir),
            "experiment": work_dir.name,
            "capture_terminal_logs": False,
        }
        self._run = Run(**{**defaults, **self._init_kwargs})
        self._run.name = run_dir.name

    def add_scalars(self, scalar_dict: dict[str, float], step: int = 0) -> None:
        """Track values."""
        run = opened(self._run, self)
        for name, value in scalar_dict.items():
            run.track(float(value), name=name, step=step)

    def add_image(self, name: str, image: Any, step: int = 0) -> None:
        """Track an image."""
        run = opened(self._run, self)
        from aim import Image

        run.track(Image(as_picture(image).numpy()), name=name, step=step)

    def add_config(self, config: Config) -> None:
        """Store the config as the run's `hparams`."""
        opened(self._run, self)["hparams"] = plain_data(config)

    def close(self) -> None:
        """End the run; its `status` is "failed" if an exception is being handled, otherwise "finished"."""
        if self._run is not None:
            self._run["status"] = "finished" if sys.exc_info()[0] is None else "failed"
            self._run.close()
            self._run = None
