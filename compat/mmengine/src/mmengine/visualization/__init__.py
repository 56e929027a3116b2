"""Visualizers: lockstep's, which show a run's records."""

from __future__ import annotations

from lockstep.visualization import Visualizer

__all__ = ["Visualizer"]
