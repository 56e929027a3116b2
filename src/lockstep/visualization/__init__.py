"""Where a run shows what it records: TensorBoard, MLflow, Weights & Biases, CSV files, a folder.

Each is a thin adapter over a library that it imports when it is opened; `Visualizers` makes one of several. Like
`lockstep.logging`, nothing here knows of ranks: the Runner opens them on rank 0 alone.
"""

from __future__ import annotations

from lockstep.visualization.csv_files import CsvVisualizer
from lockstep.visualization.local import LocalVisualizer
from lockstep.visualization.mlflow import MLflowVisualizer
from lockstep.visualization.protocol import Closes, Opens, ShowsConfig, ShowsImages, ShowsScalars
from lockstep.visualization.several import Visualizers, build_visualizers
from lockstep.visualization.tensorboard import TensorBoardVisualizer
from lockstep.visualization.wandb import WandbVisualizer

Visualizer = Visualizers  # MMEngine's name

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
