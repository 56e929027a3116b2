"""Whether a metric is better when it is greater, or when it is less."""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.errors import ConfigError

_GREATER_IS_BETTER = ("acc", "auc", "precision", "recall", "f1", "map", "miou", "dice", "top", "r2", "ar@")
_LESS_IS_BETTER = ("loss", "error", "perplexity", "mae", "mse", "wer", "cer", "nll", "fid")


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
    name = metric.rpartition("/")[2].lower()
    # Names of errors first: "top1_error" is one.
    if any(part.lower() in name for part in (_LESS_IS_BETTER if less_keys is None else less_keys)):
        return "less"
    if any(part.lower() in name for part in (_GREATER_IS_BETTER if greater_keys is None else greater_keys)):
        return "greater"
    raise ConfigError(f"`rule` must be 'greater' or 'less' for the metric {metric!r}, whose name does not tell")
