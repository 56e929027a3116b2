"""Metrics that are exact on any number of ranks."""

from __future__ import annotations

from lockstep.evaluator.accuracy import Accuracy
from lockstep.evaluator.evaluator import Evaluator, format_metrics
from lockstep.evaluator.metric import BaseMetric, LossMetric, Perplexity

__all__ = ["Accuracy", "BaseMetric", "Evaluator", "LossMetric", "Perplexity", "format_metrics"]
