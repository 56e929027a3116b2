"""Visualizers, which show a run's records: in TensorBoard, in files, or in one of several experiment trackers.

Each is a thin adapter to a library that it imports when it is opened; `Visualizers` combines several into one. As in
`lockstep.logging`, nothing here depends on ranks: the Runner opens visualizers on rank 0 only.
"""

from __future__ import annotations

from lockstep.visualization.files import LocalVisualizer
from lockstep.visualization.tensorboard import TensorBoardVisualizer
from lockstep.visualization.trackers import (
    AimVisualizer,
    ClearMLVisualizer,
    CometVisualizer,
    DVCLiveVisualizer,
    MLflowVisualizer,
    TrackioVisualizer,
    WandbVisualizer,
)
from lockstep.visualization.visualizer import ShowsScalars, Visualizers, build_visualizers

Visualizer = Visualizers
"""MMEngine's name for `Visualizers`."""

__all__ = [
    "AimVisualizer",
    "ClearMLVisualizer",
    "CometVisualizer",
    "DVCLiveVisualizer",
    "LocalVisualizer",
    "MLflowVisualizer",
    "ShowsScalars",
    "TensorBoardVisualizer",
    "TrackioVisualizer",
    "Visualizer",
    "Visualizers",
    "WandbVisualizer",
    "build_visualizers",
]
