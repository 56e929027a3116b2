"""Messages and values of a run: lockstep's, under the same names."""

from __future__ import annotations

from lockstep.logging import HistoryBuffer, MessageHub, MMLogger, print_log

__all__ = ["HistoryBuffer", "MMLogger", "MessageHub", "print_log"]
