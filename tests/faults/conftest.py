"""The table that a session of these tests prints at its end."""

from __future__ import annotations

from pathlib import Path

import pytest

from .table import Table

TABLE = pytest.StashKey[Table]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--faults-json", metavar="FILE", type=Path, help="add the figures of the table to those in FILE")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[TABLE] = Table()


@pytest.fixture
def table(request: pytest.FixtureRequest) -> Table:
    """Return the table of this session."""
    return request.config.stash[TABLE]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    table = config.stash[TABLE]
    if table.rows:
        terminalreporter.section("who is to blame, and how soon the others know")
        for line in table.lines():
            terminalreporter.write_line(line)
    if file := config.getoption("--faults-json", None):
        table.write(file)


def pytest_itemcollected(item: pytest.Item) -> None:
    item.add_marker("faults")
