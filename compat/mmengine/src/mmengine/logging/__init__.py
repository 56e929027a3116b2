"""Messages and values of a run."""

from __future__ import annotations

from mmengine.logging.history_buffer import HistoryBuffer
from mmengine.logging.logger import MMLogger, print_log
from mmengine.logging.message_hub import MessageHub

__all__ = ["HistoryBuffer", "MMLogger", "MessageHub", "print_log"]
