"""Scalars in files that a spreadsheet opens."""

from __future__ import annotations

import csv
from pathlib import Path

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
            table, _, column = name.partition("/") if "/" in name else ("scalars", "", name)
            rows.setdefault(table, {"step": step})[column] = value
        for table, row in rows.items():
            _append(self._save_dir / f"{table}.csv", row)

    def close(self) -> None:
        """Do nothing: no file stays open from one row to the next."""


def _append(path: Path, row: dict[str, float]) -> None:
    """Add a row to a table, which is written again where it lacks columns."""
    path.touch()
    with path.open(encoding="utf-8", newline="") as file:
        columns = next(csv.reader(file), [])
    if new := [name for name in row if name not in columns]:
        columns += new
        _rewrite(path, columns)
    with path.open("a", encoding="utf-8", newline="") as file:
        csv.DictWriter(file, columns).writerow(row)


def _rewrite(path: Path, columns: list[str]) -> None:
    """Write a table again with more columns; the new ones are empty in its old rows."""
    fresh = path.with_suffix(".csv.new")
    with path.open(encoding="utf-8", newline="") as old, fresh.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(csv.DictReader(old))
    fresh.replace(path)
