"""`HistoryBuffer`, where MMEngine has it."""

from __future__ import annotations

from lockstep.logging import HistoryBuffer

__all__ = ["HistoryBuffer"]
