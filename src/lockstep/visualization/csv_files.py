"""Scalars in files that a spreadsheet opens."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import TextIO

from lockstep.registry import VISUALIZERS


@VISUALIZERS.register_module()
class CsvVisualizer:
    """Writes a table of the steps: `train/loss` becomes the column `loss` of `train.csv`, `val/...` goes to `val.csv`.

    A name without a slash goes to `scalars.csv`. A name that appears late adds a column, for which the file is
    written again.

    Args:
        save_dir: where to, by default the run's folder.
    """

    def __init__(self, save_dir: str | Path | None = None) -> None:
        self._save_dir = None if save_dir is None else Path(save_dir)
        self._tables: dict[str, _Table] = {}

    def open(self, run_dir: Path) -> None:
        """Remember the folder; files begin with their first row."""
        if self._save_dir is None:
            self._save_dir = run_dir
        self._save_dir.mkdir(parents=True, exist_ok=True)

    def add_scalars(self, scalar_dict: dict[str, float], step: int = 0) -> None:
        """Write a row into each table that these values belong to."""
        if self._save_dir is None:
            raise RuntimeError("CsvVisualizer must be opened before it is used, or be given a `save_dir`")
        rows: dict[str, dict[str, float]] = {}
        for name, value in scalar_dict.items():
            table, slash, column = name.partition("/")
            rows.setdefault(table if slash else "scalars", {})[column if slash else name] = value
        for table, row in rows.items():
            if table not in self._tables:
                self._tables[table] = _Table(self._save_dir / f"{table}.csv")
            self._tables[table].write({"step": step, **row})

    def close(self) -> None:
        """Close the files."""
        for table in self._tables.values():
            table.close()


class _Table:
    """A file with a row of names and then rows of values."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._columns: list[str] = []
        self._file: TextIO | None = None

    def write(self, row: dict[str, float]) -> None:
        if self._file is None:
            self._columns = _columns_of(self._path)
        new = [name for name in row if name not in self._columns]
        if new:
            self.close()
            _add_columns(self._path, self._columns + new)
            self._columns += new
        if self._file is None:
            self._file = self._path.open("a", encoding="utf-8", newline="")
        csv.DictWriter(self._file, self._columns).writerow(row)
        self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _columns_of(path: Path) -> list[str]:
    """Return the names in the first row of a file that may be there from before."""
    if not path.exists():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        return next(csv.reader(file), [])


def _add_columns(path: Path, columns: list[str]) -> None:
    """Write a file again with more columns; the new ones are empty in its old rows."""
    rows: list[dict[str, str]] = []
    if path.exists():
        with path.open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
    fresh = path.with_suffix(".csv.new")
    with fresh.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)
    fresh.replace(path)
