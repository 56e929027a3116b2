"""The protocols of visualizers: the required one and the optional ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from lockstep.config import Config


@runtime_checkable
class ShowsScalars(Protocol):
    """The protocol that every visualizer must implement. The others in this module are optional."""

    def add_scalars(self, scalar_dict: dict[str, float], step: int = 0) -> None:
        """Show values that belong to one step."""


@runtime_checkable
class Opens(Protocol):
    """Must be opened with the run's folder before it shows anything.

    A visualizer that is not open (on every rank but 0) holds no file, thread or connection.
    """

    def open(self, run_dir: Path) -> None:
        """Start to show the run in this folder, which must exist."""


@runtime_checkable
class ShowsConfig(Protocol):
    """Shows the config of a run."""

    def add_config(self, config: Config) -> None:
        """Show the config of the run."""


@runtime_checkable
class ShowsImages(Protocol):
    """Shows images."""

    def add_image(self, name: str, image: Any, step: int = 0) -> None:
        """Show an image that belongs to one step.

        **Shapes**: `image` is [height, width] or [height, width, 3], a tensor or array of dtype uint8 (0 to 255).
        """


@runtime_checkable
class Closes(Protocol):
    """Holds resources that must be released."""

    def close(self) -> None:
        """Show what is left, and release all resources. Called at the end of a run, even if the run has failed."""
