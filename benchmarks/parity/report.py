"""The tables of a comparison, and what in them is out of tolerance."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.parity.rank import GLOBAL_BATCH, MAX_NORM, SAVED_STEP, STEPS
from benchmarks.parity.rows import Row

NORM_TOLERANCE = 1e-5  # relative, of the global gradient norm

Results = Mapping[str, Mapping[str, Mapping[str, Any]]]


def failures(rows: Sequence[Row], found: Results) -> list[str]:
    """Return a line for each figure that is missing or out of tolerance."""
    return [
        f"{row.name}: {what} is {_figure(value)}, but must be at most {limit:.0e}"
        for row in rows
        for what, value, limit in _checked(row, rows, found)
        if not isinstance(value, float) or not value <= limit
    ]


def _checked(row: Row, rows: Sequence[Row], found: Results) -> Iterator[tuple[str, float | str, float]]:
    for training in ("plain", "accumulated"):
        yield f"loss, {training}", loss_difference(found, row, training), row.loss_tolerance
        yield f"gradient norm, {training}", norm_difference(found, row, training), NORM_TOLERANCE
    yield "loss after resuming", resumed_difference(found, row, row), 0.0
    for source in rows:
        if source.nproc == row.nproc:
            tolerance = max(row.loss_tolerance, source.loss_tolerance)
            yield f"loss resumed from {source.name}", resumed_difference(found, row, source), tolerance
            yield f"state resumed from {source.name}", state_difference(found, row, source), 0.0


def loss_difference(found: Results, row: Row, training: str) -> float | str:
    """Return the largest difference from the losses of a single process."""
    return _largest(found["single"][training], found[row.name][training], "losses")


def norm_difference(found: Results, row: Row, training: str) -> float | str:
    """Return the largest relative difference from the gradient norms of a single process."""
    return _largest(found["single"][training], found[row.name][training], "norms", relative=True)


def resumed_difference(found: Results, row: Row, source: Row) -> float | str:
    """Return the largest difference from the losses that the source row had when it was not interrupted."""
    wanted = {"losses": found[source.name]["plain"].get("losses", [])[SAVED_STEP:]}
    return _largest(wanted, found[row.name][f"from {source.name}"], "losses")


def state_difference(found: Results, row: Row, source: Row) -> float | str:
    """Return the largest difference of a weight or a moment from those that were saved."""
    result = found[row.name][f"from {source.name}"]
    if "model_difference" not in result:
        return _word(result)
    return max(float(result["model_difference"]), float(result["optimizer_difference"]))


def _largest(wanted: Mapping[str, Any], present: Mapping[str, Any], key: str, relative: bool = False) -> float | str:
    if not present.get(key) or len(present[key]) != len(wanted[key]):
        return _word(present)
    pairs = zip(wanted[key], present[key], strict=True)
    return max(abs(a - b) / (abs(a) if relative else 1) for a, b in pairs)


def _word(result: Mapping[str, Any]) -> str:
    return "refused" if "refused" in result else str(result.get("failed", "missing"))


def write_report(rows: Sequence[Row], found: Results, path: Path) -> None:
    """Write the tables as Markdown."""
    path.write_text("\n".join(_lines(rows, found)) + "\n", encoding="utf-8")


def _lines(rows: Sequence[Row], found: Results) -> Iterator[str]:
    yield from (
        "# One loss curve under every strategy",
        "",
        f"`make parity` trains the language-model example (small: 132,352 parameters) for {STEPS} updates with AdamW,",
        f"a global batch of {GLOBAL_BATCH} texts and gradients clipped at {MAX_NORM}, changing nothing but `strategy`,",
        f"on real ranks over gloo (CPU, torch {torch.__version__.split('+')[0]}). The differences are the largest of",
        "all steps, from a single process: of the loss in nats; of the global gradient norm before clipping, relative.",
        "",
        "| strategy | ranks | loss | norm | loss, 4 accumulated | norm, 4 accumulated | loss after resuming "
        "| optimizer state per rank | loss in bf16 |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|",
    )
    for row in rows:
        cells = [
            loss_difference(found, row, "plain"),
            norm_difference(found, row, "plain"),
            loss_difference(found, row, "accumulated"),
            norm_difference(found, row, "accumulated"),
            resumed_difference(found, row, row),
        ]
        share = found[row.name]["plain"].get("optimizer_share")
        yield (
            f"| {row.name} | {row.nproc} | {' | '.join(map(_figure, cells))} | "
            f"{'' if share is None else f'{share:.2f}'} | {_figure(loss_difference_in_bf16(found, row))} |"
        )
    yield from (
        "",
        f"*Loss after resuming*: steps {SAVED_STEP + 1} to {STEPS} in new processes, from a checkpoint at step "
        f"{SAVED_STEP}, against the same strategy uninterrupted.",
        "*Loss in bf16*: against a single process in fp32; bfloat16 has 8 bits of precision.",
        "",
    )
    for row in rows:
        refused = found[row.name]["bf16"].get("refused")
        if refused:
            yield f"- {row.name} in bf16 is refused: {refused}"
    for nproc in sorted({row.nproc for row in rows} - {1}):
        yield from _matrix([row for row in rows if row.nproc == nproc], found, nproc)


def loss_difference_in_bf16(found: Results, row: Row) -> float | str:
    """Return the largest difference of the losses in bf16 from those of a single process in fp32."""
    return _largest(found["single"]["plain"], found[row.name]["bf16"], "losses")


def _matrix(rows: Sequence[Row], found: Results, nproc: int) -> Iterator[str]:
    yield from (
        "",
        f"## Saved under one, resumed under another, on {nproc} ranks",
        "",
        f"Rows: the strategy that saved at step {SAVED_STEP}. Columns: the strategy that resumed. A cell holds the",
        "largest difference of a later loss from the uninterrupted run. After loading, weights and Adam moments are",
        "compared one by one; they are equal unless noted.",
        "",
        "| | " + " | ".join(row.name for row in rows) + " |",
        "|---|" + "--:|" * len(rows),
    )
    for source in rows:
        cells = []
        for row in rows:
            state = state_difference(found, row, source)
            suffix = "" if state == 0.0 else f" (state: {_figure(state)})"
            cells.append(_figure(resumed_difference(found, row, source)) + suffix)
        yield f"| **{source.name}** | {' | '.join(cells)} |"


def _figure(value: float | str) -> str:
    if isinstance(value, str):
        return value
    return "0" if value == 0 else f"{value:.1e}"
