"""`MMLogger` and `print_log`, where MMEngine has them."""

from __future__ import annotations

from lockstep.logging import MMLogger, print_log

__all__ = ["MMLogger", "print_log"]
