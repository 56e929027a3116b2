"""The visualizers of a run, from what its Runner was given."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lockstep.registry import VISUALIZERS
from lockstep.visualization.several import Visualizers
from lockstep.visualization.tensorboard import TensorBoardVisualizer


def build_visualizers(given: Any) -> Visualizers:
    """Return what is given, as one that is not open yet.

    Args:
        given: a visualizer, its config, or a list of those; an empty list for none; None for TensorBoard where it is
            installed.

    Raises:
        ConfigError: a visualizer's library is not installed.
    """
    if given is None:
        return Visualizers([TensorBoardVisualizer()] if TensorBoardVisualizer.installed() else [])
    if isinstance(given, Mapping):
        given = VISUALIZERS.build(given)
    if isinstance(given, Visualizers):
        return given
    return Visualizers(given if isinstance(given, list | tuple) else [given])
