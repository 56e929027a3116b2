"""Whether a metric is better when it is greater, or when it is less."""

from __future__ import annotations

from lockstep.errors import ConfigError

_GREATER_IS_BETTER = ("acc", "auc", "precision", "recall", "f1", "map", "miou", "dice", "top", "r2")
_LESS_IS_BETTER = ("loss", "error", "perplexity", "mae", "mse", "wer", "cer", "nll", "fid")


def check_rule(rule: str | None) -> None:
    """Refuse a rule that is neither `"greater"` nor `"less"` nor None, for the metric's name to tell."""
    if rule not in (None, "greater", "less"):
        raise ConfigError(f"`rule` must be 'greater', 'less' or None, but is {rule!r}")


def rule_of(metric: str) -> str:
    """Return `"greater"` or `"less"`, as the metric's name tells.

    Raises:
        ConfigError: it does not tell.
    """
    name = metric.rpartition("/")[2].lower()
    # Names of errors first: "top1_error" is one.
    if any(part in name for part in _LESS_IS_BETTER):
        return "less"
    if any(part in name for part in _GREATER_IS_BETTER):
        return "greater"
    raise ConfigError(f"`rule` must be 'greater' or 'less' for the metric {metric!r}, whose name does not tell")
