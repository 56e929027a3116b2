"""Checks of arguments that several hooks have."""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.errors import ConfigError
from lockstep.report.best import direction_of

RULES = ("greater", "less", None)
"""Which values of a metric are better; None infers it from the metric's name."""


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


def check_local(what: str, **given: object) -> None:
    """Refuse MMEngine's arguments for storage backends, unless they are None or name the local backend.

    Raises:
        ConfigError: an argument names another backend.
    """
    for name, value in given.items():
        if value is not None and value != {"backend": "local"}:
            raise ConfigError(
                f"`{name}` must be None, but is {value!r}: {what} are written through the file system. Mount the "
                "storage, and give its folder as the Runner's `work_dir`. Checkpoints may go to a URL, by `out_dir` of "
                "CheckpointHook"
            )
