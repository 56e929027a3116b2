"""The interface of visualizers, and `Visualizers`, which combines several into one."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import Any, ClassVar, Protocol, runtime_checkable

from lockstep.config import Config
from lockstep.errors import error_in_words
from lockstep.logging.meters import require_whole
from lockstep.registry import VISUALIZERS
from lockstep.visualization.files import as_picture
from lockstep.visualization.library import LibraryVisualizer, is_installed
from lockstep.visualization.tensorboard import TensorBoardVisualizer

_REST = 20  # a visualizer is left out for so many times as long as its call took that has failed


@runtime_checkable
class ShowsScalars(Protocol):
    """The interface of a visualizer: `add_scalars`.

    These methods are called if a visualizer has them:

    - ``open(run_dir: Path)``: begin to show the run in this folder, which exists. Before that, as on every rank but 0,
      a visualizer holds no file, thread or connection.
    - ``add_config(config: Config)``: show the config of the run.
    - ``add_image(name: str, image, step: int)``: show an image that belongs to one step, a tensor or array of dtype
      uint8 (0 to 255), [height, width] or [height, width, 3].
    - ``add_text(name: str, text: str, step: int)``: show a text that belongs to one step.
    - ``close()``: show what is left, and release all resources, at the end of a run, even if the run has failed.
    """

    def add_scalars(self, scalar_dict: dict[str, float], step: int = 0) -> None:
        """Show values that belong to one step."""


@VISUALIZERS.register_module(name=["Visualizers", "Visualizer"])
class Visualizers:
    """Several visualizers as one: passes each call to those that have the method.

    `Visualizer` is another name for it. A visualizer that fails after it was opened does not end the training: what it
    could not show is left out, and its first failure is a warning.

    Args:
        vis_backends: the visualizers, or their configs.
        save_dir: the folder that they are opened with, by default the run's.
        name: the visualizer's name.
    """

    _current: ClassVar[Visualizers | None] = None

    def __init__(
        self,
        vis_backends: Iterable[Any] | None = (),
        save_dir: str | Path | None = None,
        name: str = "visualizer",
    ) -> None:
        self.name = name
        self.parts: list[ShowsScalars] = [_build(part) for part in vis_backends or ()]
        self._save_dir = None if save_dir is None else Path(save_dir)
        self._rests_until: dict[int, float] = {}  # by the `id` of a visualizer that has failed; of the monotonic clock
        self._is_closed = False

    @classmethod
    def get_current_instance(cls) -> Visualizers:
        """Return that of the current run, or of the last one, or one that shows nothing if there was no run."""
        return Visualizers() if cls._current is None else cls._current

    def make_current(self) -> None:
        """Let `get_current_instance` return this one from now on."""
        Visualizers._current = self

    def open(self, run_dir: Path) -> None:
        """Open the visualizers that have a method `open`.

        Raises:
            Exception: one of them cannot be opened, for whatever reason; a note on the exception names it.
        """
        folder = run_dir if self._save_dir is None else self._save_dir
        folder.mkdir(parents=True, exist_ok=True)
        self._rests_until.clear()  # of an earlier run
        self._is_closed = False
        for part, open_part in self._with("open"):
            try:
                open_part(folder)
            except UnicodeEncodeError:  # the locale lacks letters of the folder's name
                with self._failure_as_warning(part):
                    raise
            except Exception as error:
                error.add_note(f"while opening the visualizer {type(part).__name__}")
                raise

    def add_config(self, config: Config) -> None:
        """Show the config of the run."""
        self._show("add_config", config)

    def add_scalar(self, name: str, value: float, step: int = 0) -> None:
        """Show one value."""
        self.add_scalars({name: value}, step)

    def add_scalars(self, scalar_dict: dict[str, float], step: int = 0) -> None:
        """Show values that belong to one step."""
        for name, value in scalar_dict.items():
            require_whole(name, value)
        self._show("add_scalars", scalar_dict, step)

    def add_image(self, name: str, image: Any, step: int = 0) -> None:
        """Show an image: a tensor or array of dtype uint8, [height, width] or [height, width, 3]."""
        if self._with("add_image"):  # an image that none can show is the caller's error, and raises
            self._show("add_image", name, as_picture(image), step)

    def add_text(self, name: str, text: str, step: int = 0) -> None:
        """Show a text, such as what a model has generated: as it is, but in Trackio as Markdown, in DVCLive not."""
        self._show("add_text", name, text, step)

    def close(self, *, failed: bool = False) -> None:
        """Close all visualizers, even if closing one of them fails, which is a warning too.

        Args:
            failed: whether the run has ended by an error, which trackers are told.
        """
        for part, close in reversed(self._with("close")):
            with self._failure_as_warning(part):
                if isinstance(part, LibraryVisualizer | Visualizers):
                    close(failed=failed)
                else:
                    close()
        self._is_closed = True

    def _show(self, method: str, *values: Any) -> None:
        for part, show in self._with(method):
            if monotonic() >= self._rests_until.get(id(part), 0.0):
                with self._failure_as_warning(part):
                    show(*values)

    def _with(self, method: str) -> list[tuple[ShowsScalars, Any]]:
        """Return the visualizers that have a method, each with that method."""
        return [(part, getattr(part, method)) for part in self.parts if hasattr(part, method)]

    @contextmanager
    def _failure_as_warning(self, part: ShowsScalars) -> Iterator[None]:
        """Turn the first failure of a visualizer into a warning, and suppress its further ones.

        It is then left out for a while: a server that does not answer would take its timeout at each record.
        """
        began = monotonic()
        try:
            yield
        except Exception as error:
            now = monotonic()
            has_failed = id(part) in self._rests_until
            self._rests_until[id(part)] = now + _REST * (now - began)
            if has_failed:
                return
            text = f"has failed: {error_in_words(error)}. The run goes on without what it could not show"
            if self._is_closed:
                text = (
                    "shows nothing more: the training has ended, which has closed it. Records of a Session go on in "
                    "metrics.jsonl. Show what follows before the end: of a loop by hand inside `with session:`, of a "
                    "Runner's in a hook"
                )
            warnings.warn(
                f"the visualizer {type(part).__name__} {text}; further failures of it are not reported", stacklevel=5
            )


def build_visualizers(given: Any) -> Visualizers:
    """Combine the given visualizers into one, which is not open yet.

    Args:
        given: a visualizer, its config, or a list of those; an empty list for none; None for TensorBoard if it is
            installed.

    Raises:
        ConfigError: a visualizer's library is not installed.
    """
    if given is None:
        return Visualizers([TensorBoardVisualizer()] if is_installed("tensorboard") else [])
    if isinstance(given, Mapping):
        given = VISUALIZERS.build(given)
    if isinstance(given, Visualizers):
        return given
    return Visualizers(given if isinstance(given, list | tuple) else [given])


def _build(part: Any) -> ShowsScalars:
    built = VISUALIZERS.build(part) if isinstance(part, Mapping) else part
    if isinstance(built, type) or not isinstance(built, ShowsScalars):  # a class has the methods of its objects, too
        raise TypeError(
            f"`visualizer` must be an object with a method add_scalars, but is {built!r}. Give one, or its config "
            "as in dict(type='WandbVisualizer'), or a list of several: docs/monitoring.md has them all. Every run "
            "writes metrics.jsonl without one"
        )
    return built
