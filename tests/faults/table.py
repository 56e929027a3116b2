"""The table of faults, which a session of these tests prints: who was named, and how soon.

As a program it writes the page: `python -m tests.faults.table FILE.json docs/faults.md`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch

from .cases import Case
from .running import Outcome

HEADER = (
    "what one rank does", "where", "ranks", "error of the others", "right", "after (timeout)",
    "named first", "exit code", "ended after",
)  # fmt: skip
PAGE = """# Who is to blame

`make test-faults` runs jobs in which one rank fails (over gloo, on the CPU, torch {torch}), in each of the ways below,
and fails if another rank gets no error or a wrong one, if the launcher's first line does not name the rank that has
failed, if a job with a fault ends with exit code 0, if a rank is ended by SIGABRT, or if a process or a file is left.
{runs} jobs have made this table.

- *error of the others*: what the other ranks raise where no launcher ends them. *right*: how many of these errors name
  the rank, with the last call, the line or the stack that belong to it.
- *after*: seconds from the fault to the last of these errors; in brackets the timeout of collectives, where that is
  what ends the wait.
- *named first*: in how many jobs under `lockstep launch` the first line names the rank and what it has done; then the
  exit code of the launcher, and the seconds from the fault to its end, when nothing of the job is left (the slowest).

The times are those of a machine with two cores, on which other things may have run.

{table}
"""


@dataclass
class Row:
    """Figures of one fault on one number of ranks."""

    fault: str
    place: str
    ranks: int
    timeout: float
    error: str = ""
    told: int = 0
    others: int = 0
    seconds: float = 0.0
    named: int = 0
    jobs: int = 0
    code: int | None = None
    ended: float = 0.0
    note: str = ""

    def add(self, other: Row) -> None:
        """Add the figures of other jobs."""
        for each in ("told", "others", "named", "jobs"):
            setattr(self, each, getattr(self, each) + getattr(other, each))
        self.seconds, self.ended = max(self.seconds, other.seconds), max(self.ended, other.ended)
        self.error, self.note = other.error or self.error, other.note or self.note
        self.code = self.code if other.code is None else other.code

    def cells(self) -> tuple[str, ...]:
        """Return the row as text."""
        waited = f" ({self.timeout:g})" if self.timeout < 30 else ""
        told = (
            (self.error, f"{self.told} of {self.others}", f"{self.seconds:.1f} s{waited}") if self.others else ("",) * 3
        )
        if self.note:
            told = self.note, *told[1:]
        named = (f"{self.named} of {self.jobs}", str(self.code), f"{self.ended:.1f} s") if self.jobs else ("",) * 3
        return self.fault, self.place, str(self.ranks), *told, *named


class Table:
    """The figures of a session, in the order of the tests."""

    def __init__(self) -> None:
        self.rows: dict[tuple[str, str, int], Row] = {}

    def add(self, row: Row) -> None:
        """Add figures to those of the same fault."""
        key = row.fault, row.place, row.ranks
        if key in self.rows:
            self.rows[key].add(row)
        else:
            self.rows[key] = row

    def alone(self, case: Case, size: int, outcome: Outcome, told: Sequence[bool]) -> None:
        """Add a job without a launcher.

        Args:
            case: the fault.
            size: number of ranks.
            outcome: what became of it.
            told: for each of the other ranks, whether its error is the right one.
        """
        others = [raised for rank, raised in outcome.raised.items() if rank != case.failing]
        kinds = " or ".join(sorted({raised.kind for raised in others}))
        seconds = max((raised.seconds for raised in others), default=0.0)
        row = Row(case.fault, case.place, size, case.timeout, kinds, sum(told), len(told), seconds)
        self.add(row)

    def launched(self, case: Case, size: int, outcome: Outcome, is_named: bool) -> None:
        """Add a job under the launcher."""
        figures = {"named": int(is_named), "jobs": 1, "code": outcome.codes[0], "ended": outcome.seconds}
        self.add(Row(case.fault, case.place, size, case.timeout, **figures))

    def impossible(self, case: Case, size: int, why: str) -> None:
        """Say that a fault can't be made on this machine."""
        self.add(Row(case.fault, case.place, size, case.timeout, note=f"not possible here: {why}"))

    def lines(self) -> list[str]:
        """Return the table as text."""
        cells = [HEADER, *(row.cells() for row in self.rows.values())]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]

    def write(self, file: Path) -> None:
        """Add these figures to those in a file."""
        whole = read(file) if file.exists() else Table()
        for row in self.rows.values():
            whole.add(row)
        file.write_text(json.dumps([asdict(row) for row in whole.rows.values()], indent=1) + "\n")


def read(file: Path) -> Table:
    """Return the figures in a file."""
    table, names = Table(), {each.name for each in fields(Row)}
    for row in json.loads(file.read_text()):
        table.add(Row(**{name: value for name, value in row.items() if name in names}))
    return table


def page(table: Table) -> str:
    """Return the page of the documentation."""
    rows = sorted(
        table.rows.values(), key=lambda row: list(dict.fromkeys(r.place for r in table.rows.values())).index(row.place)
    )
    lines = [_line(HEADER), "|---|---|--:|---|--:|--:|--:|--:|--:|", *(_line(row.cells()) for row in rows)]
    runs = sum(row.jobs + row.others // max(1, row.ranks - 1) for row in rows)
    return PAGE.format(torch=torch.__version__, table="\n".join(lines), runs=runs)


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(page(read(Path(sys.argv[1]))))
