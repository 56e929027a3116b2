"""A run's console, and the handlers that send log messages there and to a file."""

from __future__ import annotations

import logging
import re
import sys
import warnings
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from lockstep.masking import mask_text, printable
from lockstep.output import tolerate_closed_output

_ROOT = "lockstep"
MAY_BE_CUT = "may_be_cut"
"""The key in a message's `extra` by which a terminal that is too narrow leaves out the last values of a line."""
_MESSAGE = logging.Formatter()  # with the traceback, if there is one
_STYLES = {logging.WARNING: "yellow", logging.ERROR: "bold red", logging.CRITICAL: "bold red"}


def open_console(*, prints: bool) -> Console:
    """Return a console on standard output; without `prints`, it shows nothing."""
    tolerate_closed_output()
    return Console(quiet=not prints, highlight=False, soft_wrap=True)


@contextmanager
def run_logging(
    console: Console,
    file: Path,
    *,
    level: int | str = "INFO",
    file_level: int | str = "INFO",
    secrets: Collection[str] = (),
) -> Iterator[logging.Logger]:
    """Send lockstep's log messages to a console and to a file until the context ends.

    Args:
        console: shows messages of `level` and above.
        file: receives messages of `file_level` and above; created at the first one.
        level: name or number of a logging level.
        file_level: the same for the file.
        secrets: strings that are shown as `***`, in addition to what looks like a secret.
    """
    logger = logging.getLogger(_ROOT)
    handlers = [_ConsoleHandler(console, secrets), _LogFile(file, secrets)]
    for handler, handler_level in zip(handlers, (level, file_level), strict=True):
        handler.setLevel(handler_level)  # an invalid level raises here, before anything has changed
    level_before, propagate_before = logger.level, logger.propagate
    for handler in handlers:
        logger.addHandler(handler)
    logger.setLevel(min(handler.level for handler in handlers))
    logger.propagate = False  # a handler on the root logger would print every message twice
    try:
        yield logger
    finally:
        logger.setLevel(level_before)
        logger.propagate = propagate_before
        for handler in handlers:
            logger.removeHandler(handler)
        try:
            for handler in handlers:
                handler.close()
        except OSError as error:  # such as a full disk, and an error about it may be on its way
            logger.warning("%s lacks its last lines: %s", file, error)


@contextmanager
def warnings_once(*, shows_distributed: bool) -> Iterator[None]:
    """Show each warning of the `warnings` module once per process, and those of torch.distributed once per job.

    torch changes the warning filters in each step, and after any change Python shows a warning again.

    Args:
        shows_distributed: show the warnings of torch.distributed, which are the same on every rank.
    """
    shown: set[tuple[str, type[Warning], str, int]] = set()
    before = warnings.showwarning

    def show(message: Any, category: type[Warning], filename: str, lineno: int, *rest: Any, **named: Any) -> None:
        key = str(message), category, filename, lineno
        if key not in shown and (shows_distributed or "/torch/distributed/" not in filename):
            shown.add(key)
            before(message, category, filename, lineno, *rest, **named)

    warnings.showwarning = show
    try:
        yield
    finally:
        warnings.showwarning = before


class _ConsoleHandler(logging.Handler):
    """Prints through a rich console, above a live progress bar if there is one."""

    def __init__(self, console: Console, secrets: Collection[str]) -> None:
        super().__init__()
        self._console = console
        self._secrets = secrets

    def emit(self, record: logging.LogRecord) -> None:
        try:
            style = _STYLES.get(record.levelno, "")
            prefix = f"{record.levelname.lower()}: " if style else ""
            text = prefix + printable(mask_text(_MESSAGE.format(record), self._secrets))
            if self._console.is_terminal:
                text = broken_between_values(text, self._console.width, getattr(record, MAY_BE_CUT, 0))
            self._console.print(Text(text, style=style))
        except Exception:
            self.handleError(record)


def broken_between_values(text: str, width: int, may_be_cut: int = 0) -> str:
    """Break lines that are wider than a terminal where two spaces stand between values, and nowhere else.

    Args:
        text: the lines.
        width: columns of the terminal.
        may_be_cut: how many values at the end of a line are left out where they would begin another line.

    Example:
        >>> print(broken_between_values("epoch 1/4  loss 1.25  val/loss 1.5", width=24))
        epoch 1/4  loss 1.25
          val/loss 1.5
        >>> print(broken_between_values("epoch 1/4  loss 1.25  lr 0.003  0.6 s", width=32, may_be_cut=2))
        epoch 1/4  loss 1.25  lr 0.003
    """
    lines: list[str] = []
    for line in text.split("\n"):
        first, *rest = re.split(r"(?<=\S)  (?=\S)", line)
        lines.append(first)
        for left, value in zip(range(len(rest), 0, -1), rest, strict=True):
            longer = f"{lines[-1]}  {value}"
            if cell_len(longer) <= width:
                lines[-1] = longer
            elif left > may_be_cut:
                lines.append(f"  {value}")
            else:
                break
    return "\n".join(lines)


class _MaskingFormatter(logging.Formatter):
    """Writes messages and tracebacks without secrets."""

    def __init__(self, secrets: Collection[str]) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s", "%Y-%m-%d %H:%M:%S")
        self._secrets = secrets

    def format(self, record: logging.LogRecord) -> str:
        # Further lines are indented, so that none looks like a record of its own.
        return printable(mask_text(super().format(record), self._secrets)).replace("\n", "\n    ")


class _LogFile(logging.FileHandler):
    """A file of messages, created at the first one; if they can't be written, as on a full disk, it warns once."""

    _has_failed = False

    def __init__(self, file: Path, secrets: Collection[str]) -> None:
        super().__init__(file, encoding="utf-8", delay=True)
        self.setFormatter(_MaskingFormatter(secrets))

    def emit(self, record: logging.LogRecord) -> None:
        try:
            super().emit(record)
        except OSError:  # the file can't be created, which `FileHandler` does not handle as it handles writing
            self.handleError(record)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  # logging's name
        error = sys.exception()
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self._has_failed:
            self._has_failed = True
            logging.getLogger(_ROOT).warning(
                "messages can't be written to %s: %s. The run goes on without them", self.baseFilename, error
            )
