"""Run the benchmarks, on two ranks unless told otherwise, and print what they found."""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import page
from lockstep.launch import JobSpec, launch

PARTS = ("tensors", "nested", "objects", "results", "training")
PEERS = "peers"  # the training part with other frameworks, where they are installed


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "parts",
        nargs="*",
        metavar="PART",
        help=f"what to measure: {', '.join(PARTS)}; default: all of these; or {PEERS}",
    )
    parser.add_argument("--nproc", type=int, nargs="+", default=[2], help="number of ranks; several: one after another")
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results.json"), help="where the figures go")
    parser.add_argument("--rounds", type=int, default=0, metavar="N", help="at most so many: to try the code")
    arguments = parser.parse_args()
    unknown = set(arguments.parts) - {*PARTS, PEERS}
    if unknown:
        parser.error(f"PART must be one of {', '.join(PARTS)}, but is {', '.join(sorted(unknown))}")
    rows = [row for nproc in arguments.nproc for row in _measured(arguments.parts or PARTS, nproc, arguments.rounds)]
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(rows, indent=1) + "\n")
    show(rows, Console(width=140))
    print(f"figures in {arguments.json}")
    if not arguments.parts and arguments.nproc == [2] and not arguments.rounds:
        page.write_section(page.SPEED, "bench", in_markdown(rows))


def _measured(parts: Sequence[str], nproc: int, rounds: int) -> list[dict[str, Any]]:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.json"
        launch(["-m", "benchmarks.rank", str(path), str(rounds), *parts], JobSpec(nproc))
        rows: list[dict[str, Any]] = json.loads(path.read_text())
    return rows


_COLUMNS = ("", "lockstep", "baseline", "ratio", "goal", "ratio of best", "peak memory", "baseline's")


def show(rows: Sequence[dict[str, Any]], console: Console) -> None:
    """Print one table of all rows."""
    table = Table(
        title="medians of many times, slowest rank; ratios below 1: lockstep is faster",
        caption="baseline: " + ", ".join(dict.fromkeys(row["baseline"] for row in rows)),
    )
    for column in _COLUMNS:
        table.add_column(column, justify="left" if column == "" else "right")
    group = ""
    for row in rows:
        if row["group"] != group:
            group = row["group"]
            table.add_section()
            table.add_row(f"[bold]{group}")
        table.add_row(*_cells(row))
    console.print(table)


def in_markdown(rows: Sequence[dict[str, Any]]) -> str:
    """Return the table for a page, without the columns of memory."""
    text = ""
    for group in dict.fromkeys(row["group"] for row in rows):
        members = [row for row in rows if row["group"] == group]
        baseline = ", ".join(dict.fromkeys(row["baseline"] for row in members))
        text += page.table((f"{group}; beside {baseline}", *_COLUMNS[1:6]), [_cells(row)[:6] for row in members]) + "\n"
    return text


def _cells(row: dict[str, Any]) -> list[str]:
    return [
        row["case"],
        _time(row["median_seconds"]),
        _time(row["baseline_median_seconds"]),
        f"{row['ratio']:.2f}",
        row["goal"],
        f"{row['best_ratio']:.2f}",
        _memory(row["peak_bytes"]),
        _memory(row["baseline_peak_bytes"]),
    ]


def _time(seconds: float) -> str:
    return f"{seconds * 1e6:.0f} us" if seconds < 1e-3 else f"{seconds * 1e3:.1f} ms"


def _memory(amount: int | None) -> str:
    return "" if amount is None else f"{amount / 2**20:.0f} MiB"


if __name__ == "__main__":
    main()
