"""Metrics: lockstep's, under the same names."""

from __future__ import annotations

from lockstep.evaluator import BaseMetric, Evaluator

__all__ = ["BaseMetric", "Evaluator"]
