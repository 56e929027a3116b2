"""The columns of one environment: `python -m benchmarks.models.engine CELLS OUT`, in a Python that has the engine."""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.models import rank, reference
from benchmarks.models.columns import COLUMNS, Column, Engine
from benchmarks.models.processes import PRELOADED, Outcome, run_on_ranks
from benchmarks.models.row import Row
from benchmarks.models.rows import ROWS
from benchmarks.models.verdicts import Results, described, verdict

Cell = tuple[str, str]


@dataclass(frozen=True)
class Saved:
    """A checkpoint that waits for a strategy to go on under, and the column that it is of."""

    column: str
    path: Path


class EngineRun:
    """Trainings and resumptions of some cells.

    Args:
        engine: whose columns are meant.
        cells: what is to be trained, by row and column.
        folder: for checkpoints.
        timeout_s: for one training.
    """

    def __init__(self, engine: Engine, cells: set[Cell], folder: Path, timeout_s: float) -> None:
        self.columns = [column for column in COLUMNS if column.engine == engine]
        self.cells, self.folder, self.timeout_s = cells, folder, timeout_s
        self.results = Results()

    def run_row(self, row: Row) -> None:
        """Train a model by hand, then under each strategy; each checkpoint goes on under the next that can."""
        trained = self.results.trained.setdefault(row.name, {})
        self.results.resumed.setdefault(row.name, {})
        columns = [column for column in self.columns if (row.name, column.name) in self.cells]
        if not columns:
            return
        by_hand = run_on_ranks(1, reference.save, (row.name, self._reference(row)), self.timeout_s)
        if by_hand:
            trained |= {column.name: by_hand for column in columns}
            return
        waiting: Saved | None = None
        for column in self.columns:
            if column in columns:
                outcome = self._do(row, column, "train", self._checkpoint(row, column))
                trained[column.name] = outcome
            if waiting is not None:
                waiting = self._resume(row, column, waiting)
            if column in columns:
                waiting = self._saved(row, column) or waiting
        for column in self.columns:
            if waiting is not None:
                waiting = self._resume(row, column, waiting)

    def _do(self, row: Row, column: Column, kind: str, checkpoint: Path) -> Outcome:
        began = time.monotonic()
        task: dict[str, Any] = {
            "row": row.name,
            "kind": kind,
            "checkpoint": str(checkpoint),
            "reference": str(self._reference(row)),
            "work_dir": tempfile.mkdtemp(dir=self.folder),
        }
        outcome = run_on_ranks(column.nproc, rank.attempt, (task, column.name), self.timeout_s)
        took = time.monotonic() - began
        print(f"{row.name}, {column.name}, {kind}: {described(outcome)[:120]} ({took:.1f} s)", flush=True)
        return outcome

    def _resume(self, row: Row, column: Column, saved: Saved) -> Saved | None:
        """Go on from a checkpoint, and return it if it still waits, because the strategy refuses the model."""
        trained = self.results.trained[row.name].get(column.name)
        if trained is not None and verdict(trained) == "refused":
            return saved
        if trained is not None and verdict(trained) == "failed":
            outcome = trained  # what can't be trained there can't be resumed there
        else:
            outcome = self._do(row, column, "resume", saved.path)
        if verdict(outcome) == "refused":
            if trained is None and not outcome["refused"].startswith("the checkpoint"):
                return saved
            outcome = {"failed": f"refused, but only where it is to be resumed: {outcome['refused']}"}
        self.results.resumed[row.name][saved.column] = {**outcome, "under": column.name}
        return None

    def _saved(self, row: Row, column: Column) -> Saved | None:
        outcome, checkpoint = self.results.trained[row.name][column.name], self._checkpoint(row, column)
        if verdict(outcome) == "refused":
            self.results.resumed[row.name][column.name] = outcome
        elif (checkpoint / "manifest.json").exists():
            return Saved(column.name, checkpoint)
        else:
            self.results.resumed[row.name][column.name] = {"failed": "nothing was saved"}
        return None

    def _checkpoint(self, row: Row, column: Column) -> Path:
        return self.folder / f"{ROWS.index(row)}-{COLUMNS.index(column)}"

    def _reference(self, row: Row) -> Path:
        return self.folder / f"{ROWS.index(row)}.pt"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.models.engine", description=__doc__)
    parser.add_argument("engine")
    parser.add_argument("cells", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--timeout", type=float, required=True)
    arguments = parser.parse_args()
    cells = {(row, column) for row, column in json.loads(arguments.cells.read_text())}
    os.environ[PRELOADED] = "\n".join(dict.fromkeys(row for row, _ in sorted(cells)))
    with tempfile.TemporaryDirectory(prefix="models-") as folder:
        engine = EngineRun(arguments.engine, cells, Path(folder), arguments.timeout)
        for row in ROWS:
            engine.run_row(row)
            engine.results.write(arguments.out)


if __name__ == "__main__":
    main()
