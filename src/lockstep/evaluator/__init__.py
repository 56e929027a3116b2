"""Metrics that are exact on any number of ranks."""

from __future__ import annotations

from lockstep.evaluator.accuracy import Accuracy
from lockstep.evaluator.evaluator import Evaluator
from lockstep.evaluator.metric import BaseMetric

__all__ = ["Accuracy", "BaseMetric", "Evaluator"]
