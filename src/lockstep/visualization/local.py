"""Scalars and images in plain files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lockstep.logging import JsonLinesSink
from lockstep.registry import VISUALIZERS
from lockstep.visualization.library import FolderVisualizer
from lockstep.visualization.png import as_picture, png_bytes


@VISUALIZERS.register_module(name=["LocalVisualizer", "LocalVisBackend"])
class LocalVisualizer(FolderVisualizer):
    """Writes scalars to `scalars.jsonl`, with their step, and images to `images/NAME_STEP.png`.

    A Runner always writes its records to `metrics.jsonl` and its config to `config.py`; this visualizer also writes
    what hooks show themselves.

    Args:
        save_dir: the folder of the files, by default the run's folder.
        img_save_dir: folder of the images in it.
        scalar_save_file: name of the file of scalars in it.
        config_save_file: from MMEngine; has no effect, because a run writes its config.
    """

    def __init__(
        self,
        save_dir: str | Path | None = None,
        img_save_dir: str = "images",
        scalar_save_file: str = "scalars.jsonl",
        config_save_file: str = "config.py",
    ) -> None:
        super().__init__(save_dir)
        self._img_save_dir = img_save_dir
        self._scalar_save_file = scalar_save_file
        self._scalars: JsonLinesSink | None = None

    def add_scalars(self, scalar_dict: dict[str, float], step: int = 0) -> None:
        """Append a line."""
        if self._scalars is None:
            self._scalars = JsonLinesSink(self._folder() / self._scalar_save_file)
        self._scalars.write({"step": step, **scalar_dict})

    def add_image(self, name: str, image: Any, step: int = 0) -> None:
        """Write a PNG file; a slash in the name creates a folder."""
        path = self._folder() / self._img_save_dir / f"{name}_{step}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(png_bytes(as_picture(image)))

    def close(self) -> None:
        """Close the file of scalars."""
        if self._scalars is not None:
            self._scalars.close()
