"""Metrics and evaluators."""

from __future__ import annotations

from mmengine.evaluator.evaluator import Evaluator
from mmengine.evaluator.metric import BaseMetric, DumpResults
from mmengine.evaluator.utils import get_metric_value

__all__ = ["BaseMetric", "DumpResults", "Evaluator", "get_metric_value"]
