"""The cells of the tables: which are chosen, and what is found of them."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.models.columns import COLUMNS, Column, Engine
from benchmarks.models.rows import ROWS, Row
from benchmarks.models.verdicts import Results

ROOT = Path(__file__).parents[2]
Cell = tuple[str, str]


def chosen_cells(rows: Sequence[Row], columns: Sequence[Column], share: tuple[int, int]) -> set[Cell]:
    """Return the cells of a share: every n-th of each row and each column, from the k-th on."""
    part, parts = share
    return {
        (row.name, column.name)
        for down, row in enumerate(ROWS)
        for across, column in enumerate(COLUMNS)
        if row in rows and column in columns and (down + across) % parts == part - 1
    }


def run(cells: set[Cell], pythons: Mapping[Engine, str], folder: Path, timeout_s: float) -> Results:
    """Return what was found of the cells, in the environment of each engine."""
    results = Results()
    todo, out = folder / "cells.json", folder / "results.json"
    todo.write_text(json.dumps(sorted(cells)))
    for engine, python in pythons.items():
        if not any(column.engine == engine for column in COLUMNS if column.name in {name for _, name in cells}):
            continue
        began = time.monotonic()
        command = [python, "-m", "benchmarks.models.engine", engine, str(todo), str(out), "--timeout", str(timeout_s)]
        subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONWARNINGS": "ignore"}, check=True)
        results.update(Results.read(out))
        print(f"{engine}: {time.monotonic() - began:.0f} s", flush=True)
    return results
