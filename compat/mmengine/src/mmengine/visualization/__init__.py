"""Drawing on images, and where images, values and configs are shown."""

from __future__ import annotations

from mmengine.visualization.vis_backend import (
    AimVisBackend,
    BaseVisBackend,
    ClearMLVisBackend,
    DVCLiveVisBackend,
    LocalVisBackend,
    MLflowVisBackend,
    NeptuneVisBackend,
    TensorboardVisBackend,
    WandbVisBackend,
)
from mmengine.visualization.visualizer import Visualizer

__all__ = [
    "AimVisBackend",
    "BaseVisBackend",
    "ClearMLVisBackend",
    "DVCLiveVisBackend",
    "LocalVisBackend",
    "MLflowVisBackend",
    "NeptuneVisBackend",
    "TensorboardVisBackend",
    "Visualizer",
    "WandbVisBackend",
]
