"""Scalars, images, texts and the config in Weights & Biases, and in Trackio, which has the same functions."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from importlib import import_module
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
        self._init(run_dir, dir=str(self._save_dir or run_dir))

    def add_scalars(self, scalar_dict: dict[str, float], step: int = 0) -> None:
        """Log values; `step` must not decrease."""
        self.opened.log(scalar_dict, step=step)

    def add_image(self, name: str, image: Any, step: int = 0) -> None:
        """Log an image."""
        run = self.opened
        run.log({name: import_module(self.package).Image(as_picture(image).numpy())}, step=step)

    def add_text(self, name: str, text: str, step: int = 0) -> None:
        """Log a text."""
        self.opened.log({name: self._as_text(text)}, step=step)

    def add_config(self, config: Config) -> None:
        """Log the values of the config."""
        self.opened.config.update(plain_data(config))

    def _as_text(self, text: str) -> Any:
        return import_module(self.package).Html(f"<pre>{escape(text)}</pre>")

    def _end(self, run: Any, *, failed: bool) -> None:
        run.finish(exit_code=int(failed))

    def _init(self, run_dir: Path, **defaults: Any) -> None:
        names = {"project": run_dir.resolve().parent.name, "name": run_dir.name}
        self._opened = import_module(self.package).init(**{**names, **defaults, **self._init_kwargs})


@VISUALIZERS.register_module()
class TrackioVisualizer(WandbVisualizer):
    """Logs to a run of Trackio, which needs no account: `trackio show --project NAME` shows it.

    Args:
        init_kwargs: arguments of `trackio.init`, for example `dict(space_id="me/digits")`. By default the project has
            the name of the work_dir, and the run that of its folder. Where Trackio keeps its files is said by the
            environment variable `TRACKIO_DIR`.
    """

    package = "trackio"

    def __init__(self, init_kwargs: Mapping[str, Any] | None = None) -> None:
        super().__init__(init_kwargs)

    def open(self, run_dir: Path) -> None:
        """Start a run of Trackio."""
        self._init(run_dir)

    def _as_text(self, text: str) -> Any:
        return import_module(self.package).Markdown(text)

    def _end(self, run: Any, *, failed: bool) -> None:
        if failed:
            run.alert("the training failed")
        run.finish()
