"""The figures as a section of docs/speed.md."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.page import table


def section(figures: dict[str, Any]) -> str:
    """Return what was measured where, and two tables."""
    return (
        f"{figures['device']}, {figures['date']}, torch {figures['torch']} (`make bench-gpu`). Medians of "
        f"{figures['rounds']} rounds of 40 steps, in random order, of the slowest\nrank, in bfloat16. GPT: 124 M "
        "parameters, 16 x 1,024 tokens per step and rank; ResNet-50: 128 images of 224 x 224. *Of by hand* is the "
        "rate\ndivided by that of the loop by hand: above 1 is faster. *Waits* is how often the host waited for the "
        "GPU in ten steps after the first ones, as\n`torch.cuda.set_sync_debug_mode` knows it; the Runner and the "
        "Session write one record in them.\n\n"
        + table(
            ("model, strategy, GPUs", "", "per second", "of by hand", "peak memory", "waits"),
            [_training(row, figures["trainings"]) for row in figures["trainings"]],
        )
        + "\nMicroseconds of the host per call:\n\n"
        + table(
            ("call", "GPUs", "lockstep", "with `sample`", "torch.distributed"),
            [_call(row) for row in figures["calls"]],
        )
    )


def _training(row: dict[str, Any], rows: Sequence[dict[str, Any]]) -> list[str]:
    case = ("model", "strategy", "ranks")
    cells = [f"{row['model']}, {row['strategy']}, {row['ranks']}", row["by"]]
    if row["error"]:
        return [*cells, f"failed: {row['error']}".replace("|", "\\|"), "", "", ""]
    by_hand = [one for one in rows if one["by"] == "by hand" and all(one[name] == row[name] for name in case)]
    base = by_hand[0]["rate"] if by_hand else None
    waits = "not counted" if row["waits"] is None else str(row["waits"])
    return [
        *cells,
        f"{row['rate']:,.0f} {row['unit']}",
        "" if base is None else f"{row['rate'] / base:.2f}",
        "" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 2**30:.2f} GiB",
        f"{waits} ({Path(row['where']).name})" if row["where"] else waits,
    ]


def _call(row: dict[str, Any]) -> list[str]:
    return [row["name"], str(row["ranks"]), *(f"{row[one]:.0f}" for one in ("off", "sample", "torch"))]
