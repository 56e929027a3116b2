"""Scalars, images and the config in Neptune."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lockstep.config import Config
from lockstep.config.source_form import plain_data
from lockstep.registry import VISUALIZERS
from lockstep.visualization.files import as_picture, png_bytes
from lockstep.visualization.library import LibraryVisualizer


@VISUALIZERS.register_module(name=["NeptuneVisualizer", "NeptuneVisBackend"])
class NeptuneVisualizer(LibraryVisualizer):
    """Logs to a run of Neptune 2, which needs a server of one's own, or to files.

    Neptune's hosted service ended in March 2026. The package `neptune` is that of MMEngine's backend; `neptune-scale`
    is for servers of Neptune 3 and is not used.

    Args:
        init_kwargs: arguments of `neptune.init_run`, for example `dict(project="group/digits", tags=["small"])`;
            without any, `mode="offline"`. By default the run has the name of the run's folder.
        save_dir: from MMEngine; has no effect. Offline, Neptune writes to `.neptune` in the working directory, or in
            that of the environment variable `NEPTUNE_DATA_DIRECTORY`.
    """

    package = "neptune"

    def __init__(self, init_kwargs: Mapping[str, Any] | None = None, save_dir: str | Path | None = None) -> None:
        super().__init__({"mode": "offline"} if init_kwargs is None else init_kwargs, save_dir)

    def open(self, run_dir: Path) -> None:
        """Start a run."""
        import neptune

        self._opened = neptune.init_run(**{"name": run_dir.name, **self._init_kwargs})

    def add_scalars(self, scalar_dict: dict[str, float], step: int = 0) -> None:
        """Append each value to its series; `step` must increase."""
        run = self.opened
        for name, value in scalar_dict.items():
            run[name].append(float(value), step=step)

    def add_image(self, name: str, image: Any, step: int = 0) -> None:
        """Append an image to the series `images/NAME`."""
        run = self.opened
        from neptune.types import File

        file = File.from_content(png_bytes(as_picture(image)), extension="png")
        run[f"images/{name}"].append(file, step=step)

    def add_config(self, config: Config) -> None:
        """Log the values of the config under `parameters`, and its text as the file `config`."""
        run = self.opened
        from neptune.types import File
        from neptune.utils import stringify_unsupported

        run["parameters"] = stringify_unsupported(plain_data(config))
        run["config"].upload(File.from_content(config.pretty_text, extension="py"))

    def _end(self, run: Any, *, failed: bool) -> None:
        if failed:
            run["sys/failed"] = True
        run.stop()
