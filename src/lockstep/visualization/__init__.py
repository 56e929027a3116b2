"""Visualizers, which show a run's records: in TensorBoard, in files, or in one of several experiment trackers.

Each is a thin adapter to a library that it imports when it is opened; `Visualizers` combines several into one. As in
`lockstep.logging`, nothing here depends on ranks: the Runner opens visualizers on rank 0 only.
"""

from __future__ import annotations

from lockstep.visualization.aim import AimVisualizer
from lockstep.visualization.clearml import ClearMLVisualizer
from lockstep.visualization.comet import CometVisualizer
from lockstep.visualization.dvclive import DVCLiveVisualizer
from lockstep.visualization.files import CsvVisualizer, LocalVisualizer
from lockstep.visualization.mlflow import MLflowVisualizer
from lockstep.visualization.tensorboard import TensorBoardVisualizer
from lockstep.visualization.visualizer import ShowsScalars, Visualizers, build_visualizers
from lockstep.visualization.wandb import TrackioVisualizer, WandbVisualizer

Visualizer = Visualizers
"""MMEngine's name for `Visualizers`."""

__all__ = [
    "AimVisualizer",
    "ClearMLVisualizer",
    "CometVisualizer",
    "CsvVisualizer",
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
