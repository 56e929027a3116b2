"""The cells of the tables: which are chosen, and what is found of them."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

from benchmarks.models.columns import COLUMNS, Engine
from benchmarks.models.verdicts import Results

ROOT = Path(__file__).parents[2]
Cell = tuple[str, str]


def run(cells: set[Cell], pythons: Mapping[Engine, str], folder: Path, timeout_s: float) -> Results:
    """Return what was found of the cells, in the environment of each engine."""
    results = Results()
    for engine, python in pythons.items():
        names = {column.name for column in COLUMNS if column.engine == engine}
        chosen = {cell for cell in cells if cell[1] in names}
        if chosen:
            results.update(_run_engine(engine, python, chosen, folder, timeout_s))
    return results


def _run_engine(engine: Engine, python: str, cells: set[Cell], folder: Path, timeout_s: float) -> Results:
    todo, out = folder / f"{engine}-cells.json", folder / f"{engine}.json"
    todo.write_text(json.dumps(sorted(cells)))
    began = time.monotonic()
    command = [python, "-m", "benchmarks.models.engine", engine, str(todo), str(out), "--timeout", str(timeout_s)]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONWARNINGS": "ignore"})
    print(f"{engine}: {time.monotonic() - began:.0f} s", flush=True)
    results = Results.read(out)
    for row, column in cells:
        # No cell is left empty, whatever happened to the process.
        missing = {"failed": f"not reached: {command[:3]} ended with {done.returncode}"}
        results.trained.setdefault(row, {}).setdefault(column, missing)
    return results
