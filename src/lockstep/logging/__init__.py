"""Messages and records of a run. Nothing here depends on ranks: the caller decides which rank prints."""

from __future__ import annotations

from lockstep.logging.loggers import open_console, run_logging, warnings_once
from lockstep.logging.meters import HistoryBuffer, MessageHub, Reading, read_scalars
from lockstep.logging.sinks import JsonLinesSink

__all__ = [
    "HistoryBuffer",
    "JsonLinesSink",
    "MessageHub",
    "Reading",
    "open_console",
    "read_scalars",
    "run_logging",
    "warnings_once",
]
