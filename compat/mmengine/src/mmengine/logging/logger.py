"""`MMLogger`, a logger with a name, and `print_log`."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any, Self

from lockstep.dist import get_rank
from lockstep.masking import mask_text, printable
from mmengine.utils.manager import ManagerMixin

__all__ = ["MMLogger", "print_log"]

_OF_RUNS = logging.getLogger("lockstep")  # a run in progress gives it handlers


class _StderrOutsideRuns(logging.Handler):
    """Shows messages while no run shows them."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print to the current standard error, unless a run in progress has its own handlers."""
        if not _OF_RUNS.handlers:
            print(printable(mask_text(self.format(record))), file=sys.stderr)


def _logger_of_runs() -> logging.Logger:
    """Return the logger whose messages go where those of the present run go."""
    logger = _OF_RUNS.getChild("mmengine")
    if not logger.handlers:  # at the first call
        logger.setLevel(logging.DEBUG)
        outside = _StderrOutsideRuns(logging.INFO)
        outside.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
        logger.addHandler(outside)
    return logger


class MMLogger(logging.Logger, ManagerMixin):
    """A logger that is found by name from anywhere, and whose messages go where those of the present run go.

    Without a run in progress, they appear on standard error. Ranks other than 0 say errors only.

    Args:
        name: the instance's name.
        logger_name: the name in messages.
        log_file: a file that also receives them.
        log_level: the lowest level that is logged.
        file_mode: how the file is opened.
        distributed: give each rank a file of its own; otherwise only rank 0 has one.
        **kwargs: further arguments of MMEngine's, without effect.
    """

    def __init__(
        self,
        name: str,
        logger_name: str = "mmengine",
        log_file: str | Path | None = None,
        log_level: int | str = "INFO",
        file_mode: str = "w",
        distributed: bool = False,
        **kwargs: Any,
    ) -> None:
        rank = get_rank()
        logging.Logger.__init__(self, logger_name, log_level if rank == 0 else logging.ERROR)
        ManagerMixin.__init__(self, name)
        self.parent = _logger_of_runs()
        if log_file is not None and (rank == 0 or distributed):
            path = Path(log_file)
            path = path.with_name(f"{path.stem}_rank{rank}{path.suffix}") if rank else path
            handler = logging.FileHandler(path, file_mode, encoding="utf-8")
            handler.setFormatter(logging.Formatter("%(asctime)s - %(name)s - %(levelname)s - %(message)s"))
            self.addHandler(handler)
            self._log_file: Path | None = path
        else:
            self._log_file = None

    @property
    def log_file(self) -> Path | None:
        """The file that also receives the messages."""
        return self._log_file

    @classmethod
    def get_current_instance(cls) -> Self:
        """Return the logger that was created last, or a new one."""
        if not cls._instance_dict:
            cls.get_instance("mmengine")
        return super().get_current_instance()


def print_log(msg: object, logger: logging.Logger | str | None = None, level: int = logging.INFO) -> None:
    """Print a message, or log it.

    Args:
        msg: the message.
        logger: None to print it, `"current"` for the logger that was created last, `"silent"` to discard it, another
            name for an instance of `MMLogger`, or a logger.
        level: the level of the message, if it is logged.

    Raises:
        ValueError: there is no logger with this name.
        TypeError: `logger` is of another type.
    """
    if logger is None:
        print(msg)
    elif isinstance(logger, logging.Logger):
        logger.log(level, msg)
    elif logger == "current":
        MMLogger.get_current_instance().log(level, msg)
    elif isinstance(logger, str):
        if logger == "silent":
            return
        if not MMLogger.check_instance_created(logger):
            raise ValueError(
                f"`logger` must be the name of a logger, but {logger!r} is none. Call MMLogger.get_instance"
            )
        MMLogger.get_instance(logger).log(level, msg)
    else:
        raise TypeError(f"`logger` must be a logger, a str or None, but is {logger!r}")
