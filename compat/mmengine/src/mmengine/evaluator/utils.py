"""A value among those of a validation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["get_metric_value"]


def get_metric_value(indicator: str, metrics: Mapping[str, Any]) -> Any:
    """Return the value of a metric, by its name or by the part of it behind the prefix.

    Args:
        indicator: ``"prefix/name"`` or ``"name"``.
        metrics: values by name.

    Raises:
        ValueError: no metric has that name, or several do.
    """
    found = [name for name in metrics if name == indicator or name.rpartition("/")[2] == indicator]
    if indicator in metrics:
        return metrics[indicator]
    if len(found) != 1:
        which = f"several have it: {', '.join(found)}. Add the prefix" if found else f"there are {', '.join(metrics)}"
        raise ValueError(f"`indicator` must be the name of one metric, but is {indicator!r}; {which}")
    return metrics[found[0]]
