"""Several visualizers as one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from lockstep.config import Config
from lockstep.registry import VISUALIZERS
from lockstep.visualization.protocol import Closes, Opens, ShowsConfig, ShowsImages, Visualizer


@VISUALIZERS.register_module(name=["Visualizers", "Visualizer"])
class Visualizers:
    """Hands everything on to each of several visualizers that is able to show it.

    Args:
        vis_backends: visualizers, or their configs.
        save_dir: the folder that they are opened in, by default that of the run.
        name: what it is called.
    """

    def __init__(
        self, vis_backends: Iterable[Any] = (), save_dir: str | Path | None = None, name: str = "visualizer"
    ) -> None:
        self.name = name
        self.parts: list[Visualizer] = [_build(part) for part in vis_backends or ()]
        self._save_dir = None if save_dir is None else Path(save_dir)

    def __len__(self) -> int:
        return len(self.parts)

    def open(self, run_dir: Path) -> None:
        """Open those that want it."""
        place = run_dir if self._save_dir is None else self._save_dir
        place.mkdir(parents=True, exist_ok=True)
        for part in self.parts:
            if isinstance(part, Opens):
                part.open(place)

    def add_config(self, config: Config) -> None:
        """Show the config of the run."""
        for part in self.parts:
            if isinstance(part, ShowsConfig):
                part.add_config(config)

    def add_scalar(self, name: str, value: float, step: int = 0) -> None:
        """Show one value."""
        self.add_scalars({name: value}, step)

    def add_scalars(self, scalar_dict: dict[str, float], step: int = 0) -> None:
        """Show values that belong to one step."""
        for part in self.parts:
            part.add_scalars(scalar_dict, step)

    def add_image(self, name: str, image: Any, step: int = 0) -> None:
        """Show a picture: a tensor or array of bytes, [height, width] or [height, width, 3]."""
        for part in self.parts:
            if isinstance(part, ShowsImages):
                part.add_image(name, image, step)

    def close(self) -> None:
        """Close all of them, whatever becomes of the others."""
        with ExitStack() as closing:
            for part in self.parts:
                if isinstance(part, Closes):
                    closing.callback(part.close)


def _build(part: Any) -> Visualizer:
    built = VISUALIZERS.build(part) if isinstance(part, Mapping) else part
    if not isinstance(built, Visualizer):
        raise TypeError(f"`visualizer` must have a method add_scalars, but is {built!r}")
    return built
