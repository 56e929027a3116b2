"""What a model costs."""

from __future__ import annotations

from mmengine.analysis.complexity_analysis import (
    activation_count,
    flop_count,
    get_model_complexity_info,
    parameter_count,
)

__all__ = ["activation_count", "flop_count", "get_model_complexity_info", "parameter_count"]
