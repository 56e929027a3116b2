"""Rules for whether a greater or a lesser value of a metric is better."""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.errors import ConfigError
from lockstep.report.best import direction_of


def check_rule(rule: str | None) -> None:
    """Refuse a rule other than `"greater"`, `"less"` and None, which infers it from the metric's name."""
    if rule not in (None, "greater", "less"):
        raise ConfigError(f"`rule` must be 'greater', 'less' or None, but is {rule!r}")


def rule_of(metric: str, greater_keys: Sequence[str] | None = None, less_keys: Sequence[str] | None = None) -> str:
    """Return `"greater"` or `"less"`, inferred from the metric's name.

    Args:
        metric: the metric's name.
        greater_keys: parts of names for which greater is better; None for the default ones.
        less_keys: the same for `"less"`.

    Raises:
        ConfigError: the name does not show which is better.
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
