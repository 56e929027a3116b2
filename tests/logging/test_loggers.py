"""Logging within a run, from anywhere."""

from __future__ import annotations

import logging
import warnings
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from lockstep.logging import open_console, run_logging, warnings_once
from lockstep.logging.loggers import MAY_BE_CUT


def test_within_a_run_its_handlers_get_everything_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with run_logging(open_console(prints=True), tmp_path / "log.txt", level="INFO", file_level="DEBUG"):
        logging.getLogger("lockstep.mine").info("from a model")
        logging.getLogger("lockstep.mine").debug("from a tool")
        logging.getLogger("lockstep.mine").warning("a warning")
    shown = capsys.readouterr()
    assert shown.out.splitlines() == ["from a model", "warning: a warning"]
    assert shown.err == ""
    written = [line.partition(": ")[2] for line in (tmp_path / "log.txt").read_text().splitlines()]
    assert written == ["from a model", "from a tool", "a warning"]


def test_the_traceback_of_a_message_is_shown_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with run_logging(open_console(prints=True), tmp_path / "log.txt") as logger:
        try:
            raise ValueError("no such token=abcdef123456")
        except ValueError:
            logger.exception("could not upload")
    first, *_, last = capsys.readouterr().out.splitlines()
    assert (first, last) == ("error: could not upload", "ValueError: no such token=***")
    assert "    ValueError: no such token=***" in (tmp_path / "log.txt").read_text().splitlines()


def test_a_narrow_terminal_breaks_lines_between_values_and_the_file_does_not(tmp_path: Path):
    line = "epoch 1/3  loss 1.1125  val/loss 1.098  val/accuracy_top1 0.34\n  indented, with two  spaces that fit"
    console = Console(file=StringIO(), force_terminal=True, width=40, soft_wrap=True)
    with run_logging(console, tmp_path / "log.txt") as logger:
        logger.info(line)
    assert console.file.getvalue().splitlines() == [
        "epoch 1/3  loss 1.1125  val/loss 1.098",
        "  val/accuracy_top1 0.34",
        "  indented, with two  spaces that fit",
    ]
    assert line.partition("\n")[0] in (tmp_path / "log.txt").read_text()


def test_the_least_important_values_of_a_line_do_not_begin_another_one(tmp_path: Path):
    line = "epoch 1/3  loss 1.1125  val/loss 1.098  2,022 samples/s  lr 0.003  0.6 s"
    console = Console(file=StringIO(), force_terminal=True, width=60, soft_wrap=True)
    with run_logging(console, tmp_path / "log.txt") as logger:
        logger.info(line, extra={MAY_BE_CUT: 3})
        logger.info(line, extra={MAY_BE_CUT: 1})
    assert console.file.getvalue().splitlines() == [
        "epoch 1/3  loss 1.1125  val/loss 1.098  2,022 samples/s",
        "epoch 1/3  loss 1.1125  val/loss 1.098  2,022 samples/s",
        "  lr 0.003  0.6 s",
    ]
    assert (tmp_path / "log.txt").read_text().count(line) == 2


@pytest.mark.parametrize(
    ("file", "says"),
    [("/dev/full", "[Errno 28] No space left on device"), ("/dev/null/log.txt", "[Errno 20] Not a directory")],
)
def test_a_log_that_cannot_be_written_is_warned_of_once(capsys: pytest.CaptureFixture[str], file: str, says: str):
    with run_logging(open_console(prints=True), Path(file), level="WARNING") as logger:
        for number in range(3):
            logger.info("message %d", number)
    shown = capsys.readouterr()
    assert shown.out.count(f"messages can't be written to {file}: {says}") == 1
    assert "Logging error" not in shown.err


# What a run prints.


def test_a_warning_is_shown_once_although_filters_change():
    def warn(line: int, file: str = "one.py") -> None:
        warnings.warn_explicit("the same", UserWarning, file, line)
        with warnings.catch_warnings():  # makes Python forget what it has shown
            warnings.simplefilter("ignore")

    distributed = "/lib/torch/distributed/fsdp.py"
    with warnings.catch_warnings(record=True) as caught, warnings_once(shows_distributed=True):
        warnings.simplefilter("always")
        for line in (1, 1, 2, 1):
            warn(line)
        warn(1, distributed)
    assert [(warning.filename, warning.lineno) for warning in caught] == [
        ("one.py", 1),
        ("one.py", 2),
        (distributed, 1),
    ]
    with warnings.catch_warnings(record=True) as caught, warnings_once(shows_distributed=False):
        warnings.simplefilter("always")
        warn(1)
        warn(1, distributed)
    assert [warning.filename for warning in caught] == ["one.py"]


def test_a_log_that_cannot_be_completed_hides_no_error():
    def train() -> None:
        with run_logging(open_console(prints=False), Path("/dev/full")) as logger:
            logger.info("one line")
            raise ValueError("of the training")

    with pytest.raises(ValueError, match="of the training"):
        train()
