"""What a visualizer must be able to do, and what it may."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from lockstep.config import Config


@runtime_checkable
class ShowsScalars(Protocol):
    """What every visualizer can do. The other protocols here are abilities that it may have as well."""

    def add_scalars(self, scalar_dict: dict[str, float], step: int = 0) -> None:
        """Show values that belong to one step."""


@runtime_checkable
class Opens(Protocol):
    """Wants to know where the run is kept before it shows anything.

    What exists unopened (on every rank but 0) holds no file, thread or connection.
    """

    def open(self, run_dir: Path) -> None:
        """Begin to show the run of this folder, which exists."""


@runtime_checkable
class ShowsConfig(Protocol):
    """Shows what a run is made of."""

    def add_config(self, config: Config) -> None:
        """Show the config of the run."""


@runtime_checkable
class ShowsImages(Protocol):
    """Shows pictures."""

    def add_image(self, name: str, image: Any, step: int = 0) -> None:
        """Show a picture that belongs to one step.

        **Shapes**: `image` is [height, width] or [height, width, 3], a tensor or array of bytes (0 to 255).
        """


@runtime_checkable
class Closes(Protocol):
    """Holds something that has to be let go."""

    def close(self) -> None:
        """Show what is still to be shown, and let go. Called at the end of a run even if it has failed."""
