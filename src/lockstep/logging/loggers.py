"""Loggers for code without a Runner: messages of a model or a metric go where the run's own messages go."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

from lockstep.logging.console import file_handler
from lockstep.masking import mask_text, printable

_ROOT = "lockstep"
_USERS = f"{_ROOT}.user"


class MMLogger:
    """Access to the loggers of the current run from anywhere.

    Their messages appear on the run's console and in its log file, at the levels that these show. Without a run in
    progress, messages of INFO and above appear on standard error.

    Example:
        >>> MMLogger.get_current_instance().name
        'lockstep.user'
        >>> MMLogger.get_instance("tools").name
        'lockstep.user.tools'
    """

    @staticmethod
    def get_current_instance() -> logging.Logger:
        """Return the logger of the run."""
        logger = logging.getLogger(_USERS)
        if not logger.handlers:
            logger.setLevel(logging.DEBUG)
            outside = _OutsideOfRuns(logging.INFO)
            outside.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
            logger.addHandler(outside)
        return logger

    @classmethod
    def get_instance(
        cls, name: str, log_file: str | Path | None = None, log_level: int | str | None = None, **others: Any
    ) -> logging.Logger:
        """Return a child of the run's logger.

        Args:
            name: the logger's name.
            log_file: a file that also receives its messages.
            log_level: the lowest level that it logs; None leaves it unchanged.
            **others: MMEngine's further arguments, which have no effect.
        """
        logger = cls.get_current_instance().getChild(name)
        if log_level is not None:
            logger.setLevel(log_level)
        if log_file is not None and not logger.handlers:
            logger.addHandler(file_handler(Path(log_file)))
        return logger

    @staticmethod
    def check_instance_created(name: str) -> bool:
        """Return whether there is a logger with this name."""
        return f"{_USERS}.{name}" in logging.Logger.manager.loggerDict


def print_log(msg: object, logger: logging.Logger | str | None = None, level: int = logging.INFO) -> None:
    """Print a message, or log it.

    Args:
        msg: the message.
        logger: None to print it, `"current"` for the run's logger, `"silent"` to discard it, another name for a logger
            that `MMLogger.get_instance` has created, or a logger.
        level: the level of the message, if it is logged.

    Raises:
        ValueError: there is no logger with this name.
    """
    if logger is None:
        print(msg)
    elif isinstance(logger, logging.Logger):
        logger.log(level, msg)
    elif logger == "current":
        MMLogger.get_current_instance().log(level, msg)
    elif logger != "silent":
        if not MMLogger.check_instance_created(logger):
            raise ValueError(
                f"`logger` must be the name of a logger, but {logger!r} is none. Call MMLogger.get_instance"
            )
        MMLogger.get_instance(logger).log(level, msg)


class _OutsideOfRuns(logging.Handler):
    """Shows messages while no run shows them."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print to the current standard error, unless a run in progress has its own handlers."""
        if not logging.getLogger(_ROOT).handlers:
            print(printable(mask_text(self.format(record))), file=sys.stderr)
