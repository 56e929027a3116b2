"""Whether a metric is better when it is greater, or when it is less."""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.errors import ConfigError
from lockstep.report.best import direction_of


def check_rule(rule: str | None) -> None:
    """Refuse a rule that is neither `"greater"` nor `"less"` nor None, for the metric's name to tell."""
    if rule not in (None, "greater", "less"):
        raise ConfigError(f"`rule` must be 'greater', 'less' or None, but is {rule!r}")


def rule_of(metric: str, greater_keys: Sequence[str] | None = None, less_keys: Sequence[str] | None = None) -> str:
    """Return `"greater"` or `"less"`, as the metric's name tells.

    Args:
        metric: its name.
        greater_keys: parts of names that tell that greater is better; None for the usual ones.
        less_keys: the same for less.

    Raises:
        ConfigError: it does not tell.
    """
    name = metric.rpartition("/")[2]
    if any(part.lower() in name.lower() for part in less_keys or ()):
        return "less"
    if any(part.lower() in name.lower() for part in greater_keys or ()):
        return "greater"
    rule = direction_of(name)
    if rule is None or (less_keys if rule == "less" else greater_keys) is not None:
        raise ConfigError(f"`rule` must be 'greater' or 'less' for the metric {metric!r}, whose name does not tell")
    return rule
