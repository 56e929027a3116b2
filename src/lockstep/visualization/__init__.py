"""Visualizers, which show a run's records: TensorBoard, MLflow, Weights & Biases, CSV files, a folder.

Each is a thin adapter to a library that it imports when it is opened; `Visualizers` combines several into one. As in
`lockstep.logging`, nothing here depends on ranks: the Runner opens visualizers on rank 0 only.
"""

from __future__ import annotations

from lockstep.visualization.csv_files import CsvVisualizer
from lockstep.visualization.local import LocalVisualizer
from lockstep.visualization.mlflow import MLflowVisualizer
from lockstep.visualization.protocol import Closes, Opens, ShowsConfig, ShowsImages, ShowsScalars
from lockstep.visualization.several import Visualizers, build_visualizers
from lockstep.visualization.tensorboard import TensorBoardVisualizer
from lockstep.visualization.wandb import WandbVisualizer

Visualizer = Visualizers
"""MMEngine's name for `Visualizers`."""

__all__ = [
    "Closes",
    "CsvVisualizer",
    "LocalVisualizer",
    "MLflowVisualizer",
    "Opens",
    "ShowsConfig",
    "ShowsImages",
    "ShowsScalars",
    "TensorBoardVisualizer",
    "Visualizer",
    "Visualizers",
    "WandbVisualizer",
    "build_visualizers",
]
