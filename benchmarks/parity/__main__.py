"""Train the language-model example under every strategy, and compare losses, gradient norms and checkpoints."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.parity.rank import SAVED_STEP
from benchmarks.parity.report import failures, write_report
from benchmarks.parity.rows import ROWS, Engine, Row

ROOT = Path(__file__).parents[2]
ACCUMULATED = 4  # batches in an update, in the second training of each row

Found = dict[str, dict[str, Any]]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.parity", description=__doc__)
    parser.add_argument("rows", nargs="*", metavar="ROW", help="names of rows, default: all; 'single' is always there")
    for engine in ("deepspeed", "colossalai"):
        parser.add_argument(f"--{engine}-python", default=sys.executable, help=f"a Python that has {engine}")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "parity.md", help="where the tables go")
    arguments = parser.parse_args()
    unknown = set(arguments.rows) - {row.name for row in ROWS}
    if unknown:
        parser.error(f"ROW must be one of {', '.join(row.name for row in ROWS)}, but is {', '.join(sorted(unknown))}")
    rows = [row for row in ROWS if not arguments.rows or row.name in {"single", *arguments.rows}]
    pythons: dict[Engine, str] = {
        "torch": sys.executable,
        "deepspeed": arguments.deepspeed_python,
        "colossalai": arguments.colossalai_python,
    }
    with tempfile.TemporaryDirectory(prefix="parity-") as folder:
        found = compare(rows, pythons, Path(folder))
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    write_report(rows, found, arguments.out)
    broken = failures(rows, found)
    print("\n".join(broken) or "all within their tolerances")
    print(f"tables in {arguments.out}")
    sys.exit(bool(broken))


def compare(rows: Sequence[Row], pythons: dict[Engine, str], folder: Path) -> dict[str, Found]:
    """Return what was found, by row and training; each row's trainings run in processes of their own."""
    found = {row.name: _run(row, _trainings(row, folder), pythons, folder) for row in rows}
    for row in rows:
        found[row.name] |= _run(row, _resumptions(row, rows, folder), pythons, folder)
    return found


def _trainings(row: Row, folder: Path) -> dict[str, dict[str, Any]]:
    job = {"strategy": row.strategy, "data_ranks": row.data_ranks, "counts": 1}
    return {
        "plain": {**job, "digest": str(folder / f"{row.name}.pt")},
        "accumulated": {**job, "counts": ACCUMULATED},
        "bf16": {**job, "overrides": row.bf16},
    }


def _resumptions(row: Row, rows: Sequence[Row], folder: Path) -> dict[str, dict[str, Any]]:
    """Return the trainings that go on where a row of as many ranks, its own among them, was saved."""
    jobs = {}
    for source in rows:
        if source.nproc == row.nproc:
            (checkpoint,) = (folder / source.name).glob(f"plain/*/iter_{SAVED_STEP}")
            jobs[f"from {source.name}"] = {
                "strategy": row.strategy,
                "data_ranks": row.data_ranks,
                "counts": 1,
                "resume_from": str(checkpoint),
                "reference": str(folder / f"{source.name}.pt"),
            }
    return jobs


def _run(row: Row, jobs: dict[str, dict[str, Any]], pythons: dict[Engine, str], folder: Path) -> Found:
    todo, out = folder / "jobs.json", folder / "found.json"
    todo.write_text(
        json.dumps({name: {**job, "work_dir": str(folder / row.name / name)} for name, job in jobs.items()})
    )
    out.unlink(missing_ok=True)
    start = time.monotonic()
    command = [pythons[row.engine], "-m", "lockstep", "launch", "--nproc", str(row.nproc)]
    command += ["-m", "benchmarks.parity.rank", str(todo), str(out)]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=900
    )
    print(f"{row.name}: {', '.join(jobs)} ({time.monotonic() - start:.0f} s)", flush=True)
    found: Found = json.loads(out.read_text()) if out.exists() else {}
    if done.returncode:
        # What was found before the failure still counts; the rest is marked as failed.
        print(done.stdout[-2000:], done.stderr[-6000:], sep="\n", flush=True)
        found |= {name: {"failed": f"exit code {done.returncode}"} for name in jobs.keys() - found.keys()}
    return found


if __name__ == "__main__":
    main()
