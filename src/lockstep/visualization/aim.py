"""Scalars, images, texts and the config in Aim."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lockstep.config import Config
from lockstep.config.source_form import plain_data
from lockstep.registry import VISUALIZERS
from lockstep.visualization.files import as_picture
from lockstep.visualization.library import LibraryVisualizer


@VISUALIZERS.register_module(name=["AimVisualizer", "AimVisBackend"])
class AimVisualizer(LibraryVisualizer):
    """Tracks a run in an Aim repository.

    Args:
        init_kwargs: arguments of `aim.Run`, for example `dict(repo="aim://server:53800")`. By default the experiment
            has the name of the work_dir, and the output of the terminal, which a run logs itself, is not captured.
        save_dir: the folder of the repository, `.aim`; by default the work_dir, shared by all its runs. Show it with
            `aim up --repo`.
    """

    package = "aim"

    def open(self, run_dir: Path) -> None:
        """Start an Aim run with the name of the run's folder."""
        from aim import Run

        work_dir = run_dir.resolve().parent
        defaults = {
            "repo": str(work_dir if self._save_dir is None else self._save_dir),
            "experiment": work_dir.name,
            "capture_terminal_logs": False,
        }
        self._opened = Run(**{**defaults, **self._init_kwargs})
        self._opened.name = run_dir.name

    def add_scalars(self, scalar_dict: dict[str, float], step: int = 0) -> None:
        """Track values."""
        run = self.opened
        for name, value in scalar_dict.items():
            run.track(float(value), name=name, step=step)

    def add_image(self, name: str, image: Any, step: int = 0) -> None:
        """Track an image."""
        run = self.opened
        from aim import Image

        run.track(Image(as_picture(image).numpy()), name=name, step=step)

    def add_text(self, name: str, text: str, step: int = 0) -> None:
        """Track a text."""
        run = self.opened
        from aim import Text

        run.track(Text(text), name=name, step=step)

    def add_config(self, config: Config) -> None:
        """Store the config as the run's `hparams`."""
        self.opened["hparams"] = plain_data(config)

    def _end(self, run: Any, *, failed: bool) -> None:
        run["status"] = "failed" if failed else "finished"
        run.close()
