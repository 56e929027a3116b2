"""In which order hooks are called."""

from __future__ import annotations

from enum import Enum

__all__ = ["Priority", "get_priority"]


class Priority(Enum):
    """Names of priorities; hooks with lower numbers are called first."""

    HIGHEST = 0
    VERY_HIGH = 10
    HIGH = 30
    ABOVE_NORMAL = 40
    NORMAL = 50
    BELOW_NORMAL = 60
    LOW = 70
    VERY_LOW = 90
    LOWEST = 100


def get_priority(priority: int | str | Priority) -> int:
    """Return the number of a priority.

    Raises:
        ValueError: it is not from 0 to 100.
        TypeError: it is neither a number, a name nor a `Priority`.
    """
    if isinstance(priority, Priority):
        return priority.value
    if isinstance(priority, str):
        return Priority[priority.upper()].value
    if not isinstance(priority, int):
        raise TypeError(f"`priority` must be an int, a str or a Priority, but is {priority!r}")
    if not 0 <= priority <= 100:
        raise ValueError(f"`priority` must be from 0 to 100, but is {priority}")
    return priority
