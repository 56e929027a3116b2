"""Scalars in CSV files."""

from __future__ import annotations

import csv
from pathlib import Path

from lockstep.registry import VISUALIZERS
from lockstep.visualization.library import FolderVisualizer


@VISUALIZERS.register_module()
class CsvVisualizer(FolderVisualizer):
    """Writes one row per step: `train/loss` becomes the column `loss` of `train.csv`, `val/...` goes to `val.csv`.

    A name without a slash goes to `scalars.csv`. A name that appears later adds a column; the file is then rewritten.

    Args:
        save_dir: the folder of the files, by default the run's folder.
    """

    def add_scalars(self, scalar_dict: dict[str, float], step: int = 0) -> None:
        """Append a row to each table that these values belong to."""
        folder = self._folder()
        rows: dict[str, dict[str, float]] = {}
        for name, value in scalar_dict.items():
            table, _, column = name.partition("/") if "/" in name else ("scalars", "", name)
            rows.setdefault(table, {"step": step})[column] = value
        for table, row in rows.items():
            _append(folder / f"{table}.csv", row)

    def close(self) -> None:
        """Do nothing: no file stays open from one row to the next."""


def _append(path: Path, row: dict[str, float]) -> None:
    """Add a row to a table, and rewrite the table if it lacks columns."""
    path.touch()
    with path.open(encoding="utf-8", newline="") as file:
        columns = next(csv.reader(file), [])
    if new := [name for name in row if name not in columns]:
        columns += new
        _rewrite(path, columns)
    with path.open("a", encoding="utf-8", newline="") as file:
        csv.DictWriter(file, columns).writerow(row)


def _rewrite(path: Path, columns: list[str]) -> None:
    """Rewrite a table with more columns; the new ones are empty in its old rows."""
    fresh = path.with_suffix(".csv.new")
    with path.open(encoding="utf-8", newline="") as old, fresh.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(csv.DictReader(old))
    fresh.replace(path)
