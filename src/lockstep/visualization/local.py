"""Scalars and pictures in plain files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lockstep.logging import JsonLinesSink
from lockstep.registry import VISUALIZERS
from lockstep.visualization.png import as_picture, png_bytes


@VISUALIZERS.register_module(name=["LocalVisualizer", "LocalVisBackend"])
class LocalVisualizer:
    """Writes scalars to `scalars.jsonl`, with their step, and pictures to `images/NAME_STEP.png`.

    What a Runner records is in its `metrics.jsonl` in any case; here is also what hooks show by themselves.

    Args:
        save_dir: where to, by default the run's folder.
    """

    def __init__(self, save_dir: str | Path | None = None) -> None:
        self._save_dir = None if save_dir is None else Path(save_dir)
        self._scalars: JsonLinesSink | None = None

    def open(self, run_dir: Path) -> None:
        """Remember the folder; files begin with what is written to them."""
        if self._save_dir is None:
            self._save_dir = run_dir
        self._save_dir.mkdir(parents=True, exist_ok=True)

    def add_scalars(self, scalar_dict: dict[str, float], step: int = 0) -> None:
        """Write a line."""
        if self._scalars is None:
            self._scalars = JsonLinesSink(self._folder() / "scalars.jsonl")
        self._scalars.write({"step": step, **scalar_dict})

    def add_image(self, name: str, image: Any, step: int = 0) -> None:
        """Write a PNG file; a slash in the name makes a folder."""
        path = self._folder() / "images" / f"{name}_{step}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(png_bytes(as_picture(image)))

    def close(self) -> None:
        """Close the file of scalars."""
        if self._scalars is not None:
            self._scalars.close()

    def _folder(self) -> Path:
        if self._save_dir is None:
            raise RuntimeError("LocalVisualizer must be opened before it is used, or be given a `save_dir`")
        return self._save_dir
