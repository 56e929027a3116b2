"""Runs that resume under another strategy, in the middle of an epoch: are weights, moments and losses the same?

And under the same one, with dropout: are losses the same bit for bit?
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.parity.rows import ROWS as PARITY_ROWS
from benchmarks.parity.rows import Engine, Row
from benchmarks.resume.rank import COMPARED, SAVED

ROOT = Path(__file__).parents[2]
LOSS_TOLERANCE = 1e-6
_NAMED = {row.name: row for row in PARITY_ROWS}
ROWS = (
    _NAMED["single"],
    _NAMED["DDP-2"],
    replace(_NAMED["DDP-2"], name="DDP-3", nproc=3),
    _NAMED["FSDP-2"],
    replace(_NAMED["FSDP-2"], name="FSDP-3", nproc=3),
    _NAMED["HSDP-2x2"],
    _NAMED["FSDP-2 x TP-2"],
    *(_NAMED[f"DeepSpeed {stage}"] for stage in (1, 2, 3)),
    *(_NAMED[f"ColossalAI {stage}"] for stage in ("zero1", "zero2")),
)
_NOT_BITWISE = ("DDP-3",)  # DDP arranges its buckets anew after its first step, and so the order of three summands
_WITHOUT_AVERAGE = ("DeepSpeed 3",)  # EMAHook refuses weights that are in pieces between steps

Found = dict[str, dict[str, dict[str, Any]]]


def run(rows: Sequence[Row], pythons: Mapping[Engine, str]) -> Found:
    """Return what was found, by row and training; the trainings of a row are one job after the other."""
    with tempfile.TemporaryDirectory(prefix="resume-") as name:
        folder = Path(name)
        found = {row.name: _launched(row, _trainings(row, folder), pythons, folder) for row in rows}
        for row in rows:
            found[row.name] |= _launched(row, _resumptions(row, rows, folder), pythons, folder)
    return found


def _trainings(row: Row, folder: Path) -> dict[str, dict[str, Any]]:
    return {kind: _job(row, folder, row, kind, saves=True) for kind in _kinds(row)}


def _resumptions(row: Row, rows: Sequence[Row], folder: Path) -> dict[str, dict[str, Any]]:
    jobs = {}
    for source in rows:
        for kind in _kinds(row) & _kinds(source) - ({"dropout"} if source is not row else set()):
            checkpoints = list((folder / source.name / kind).glob(f"*/iter_{SAVED}"))
            if checkpoints:
                job = _job(row, folder, source, kind, saves=False)
                jobs[f"{kind} from {source.name}"] = {**job, "resume_from": str(checkpoints[0])}
    return jobs


def _kinds(row: Row) -> set[str]:
    return {"plain", "dropout"} if row.name in _WITHOUT_AVERAGE else {"plain", "dropout", "averaged"}


def _job(row: Row, folder: Path, source: Row, kind: str, *, saves: bool) -> dict[str, Any]:
    return {
        "strategy": row.strategy,
        "data_ranks": row.data_ranks,
        "averages": kind == "averaged",
        "dropout": 0.1 if kind == "dropout" else 0.0,
        "saves": saves,
        "digest": str(folder / f"{source.name}-{kind}.pt"),
        "work_dir": str(folder / row.name / (kind if saves else f"{kind} from {source.name}")),
    }


def _launched(row: Row, jobs: dict[str, dict[str, Any]], pythons: Mapping[Engine, str], folder: Path) -> Any:
    todo, out = folder / "jobs.json", folder / "found.json"
    todo.write_text(json.dumps(jobs))
    out.unlink(missing_ok=True)
    start = time.monotonic()
    command = [pythons[row.engine], "-m", "lockstep", "launch", "--nproc", str(row.nproc)]
    command += ["-m", "benchmarks.resume.rank", str(todo), str(out)]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=1800
    )
    print(f"{row.name}: {len(jobs)} trainings ({time.monotonic() - start:.0f} s)", flush=True)
    found = json.loads(out.read_text()) if out.exists() else {}
    if done.returncode:
        print(done.stdout[-2000:], done.stderr[-6000:], sep="\n", flush=True)
        found |= {name: {"failed": f"exit code {done.returncode}"} for name in jobs.keys() - found.keys()}
    return found


def faults(rows: Sequence[Row], found: Found) -> list[str]:
    """Return a line for each figure that is missing or too large."""
    lines = []
    for source in rows:
        for row in rows:
            state, losses = compared(source, row, found)
            for what, value, limit in (("state", state, 0.0), ("losses", losses, LOSS_TOLERANCE)):
                if not isinstance(value, float) or not value <= limit:
                    lines.append(f"{source.name} to {row.name}: {what}: {_figure(value)}, but must be at most {limit}")
        value, limit = again(source, found), LOSS_TOLERANCE if source.name in _NOT_BITWISE else 0.0
        if not isinstance(value, float) or not value <= limit:
            lines.append(f"{source.name}, with dropout: {_figure(value)}, but must be at most {limit}")
    return lines


def again(row: Row, found: Found) -> float | str:
    """Return the largest difference of a later loss, with dropout, if a run resumes as it was."""
    resumed = found[row.name].get(f"dropout from {row.name}", {"failed": "missing"})
    if "losses" not in resumed:
        return str(resumed.get("refused") or resumed.get("failed"))
    wanted = found[row.name]["dropout"]["losses"][SAVED:]
    if len(resumed["losses"]) != len(wanted) or wanted == found[row.name]["plain"]["losses"][SAVED:]:
        return "no dropout, or another number of iterations"
    return max(abs(a - b) for a, b in zip(wanted, resumed["losses"], strict=True))


def compared(source: Row, row: Row, found: Found) -> tuple[float | str, float | str]:
    """Return the largest difference of the restored state, and that of a later loss."""
    plain = found[row.name].get(f"plain from {source.name}", {"failed": "missing"})
    results = [plain]
    if "averaged" in _kinds(row) & _kinds(source):
        results.append(found[row.name].get(f"averaged from {source.name}", {"failed": "missing"}))
    for one in results:
        if "losses" not in one:
            return (word := "refused" if "refused" in one else str(one.get("failed"))), word
    state = max(float(one[key]) for one in results for key in ("model", "optimizer", "average", "schedules"))
    wanted = found[source.name]["plain"]["losses"][SAVED:]
    if len(plain["losses"]) != COMPARED or len(wanted) != COMPARED:
        return state, f"{len(plain['losses'])} iterations, and {len(wanted)} without a stop"
    return state, max(abs(a - b) for a, b in zip(wanted, plain["losses"], strict=True))


def table(rows: Sequence[Row], found: Found) -> list[str]:
    """Return the table as lines of Markdown."""
    lines = ["| saved under | " + " | ".join(row.name for row in rows) + " |", "|---|" + "--:|" * len(rows)]
    for source in rows:
        cells = []
        for row in rows:
            state, losses = compared(source, row, found)
            cells.append(_figure(losses) + ("" if state in (0.0, losses) else f" (state: {_figure(state)})"))
        lines.append(f"| **{source.name}** | {' | '.join(cells)} |")
    lines.append(f"| *as it was, with dropout* | {' | '.join(_figure(again(row, found)) for row in rows)} |")
    return lines


def _figure(value: float | str) -> str:
    if isinstance(value, str):
        return value
    return "0" if value == 0 else f"{value:.1e}"
