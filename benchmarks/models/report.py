"""The page with the tables."""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from textwrap import wrap

from benchmarks.models.columns import COLUMNS, Engine
from benchmarks.models.processes import Outcome
from benchmarks.models.row import EPOCH_STEPS, GLOBAL_BATCH, MAX_NORM, STEPS, VALIDATED
from benchmarks.models.rows import ROWS
from benchmarks.models.verdicts import TOLERANCES, Cells, Results, verdict, worst

_ASKED = (
    "import importlib.metadata as m, json; print(json.dumps({d.name.lower(): d.version for d in m.distributions()}))"
)
_SHOWN = ("torch", "transformers", "peft", "diffusers", "deepspeed", "colossalai")


def versions(pythons: Mapping[Engine, str]) -> dict[str, str]:
    """Return which packages each environment has, where they matter, as a sentence has it."""
    found = {}
    for engine, python in pythons.items():
        done = subprocess.run([python, "-c", _ASKED], capture_output=True, text=True, check=True)
        present = json.loads(done.stdout)
        found[engine] = ", ".join(f"{name} {present[name].split('+')[0]}" for name in _SHOWN if name in present)
    return found


def write_report(results: Results, on_device: Results, path: Path) -> None:
    """Write the tables as Markdown, with a paragraph on what was found on the simulated accelerator."""
    path.write_text("\n".join(_lines(results, on_device)) + "\n", encoding="utf-8")


def _lines(results: Results, on_device: Results) -> Iterator[str]:
    notes = _Notes()
    tolerances = ", ".join(f"{_figure(limit)} for {_WHAT[name]}" for name, limit in TOLERANCES.items())
    yield from ("# The same numbers, whatever the model", "")
    yield from _paragraph(
        f"""`make test-models` trains {len(ROWS)} kinds of models under {len(COLUMNS)} strategies, through the Runner,
        changing nothing but `strategy`, on real ranks over gloo (CPU). Each training is compared with a
        hand-written loop: plain torch in one process, with the same initial weights, over the same batches, in
        float32. {STEPS} batches of {GLOBAL_BATCH} (two epochs of {EPOCH_STEPS}), an update for each unless said, by
        AdamW, gradients clipped at a norm of {MAX_NORM}, then a validation over {VALIDATED} samples. The models are
        small (two layers, a width of 32 or less) and drawn from a seed; nothing is downloaded."""
    )
    yield from _paragraph(
        f"""A cell holds the largest relative difference of four: of the loss and of the gradient norm in any update, of
        any weight at the end (relative to the largest of its tensor), and of the validated number: the mean
        magnitude of the outputs over all samples. Tolerances: {tolerances}. A model's own `train_step` must have
        been called once per batch. *refused* means that lockstep says before the first update, on every rank, that
        it can't do this; the sentences are below. A figure with *but* leaves out weights that a warning names in
        the first update, because the engine trains them differently. *wrong* (out of tolerance) and *failed*
        (anything else) make the command fail."""
    )
    yield from (f"* {_ENGINES[engine]}: {what}" for engine, what in results.made.items())
    yield ""
    yield from _device_paragraph(results, on_device)
    yield from _table(results.trained, notes)
    yield ""
    for row in ROWS:
        if row.note:
            yield from _wrapped(f"* **{row.name}**: {row.note}", subsequent_indent="  ")
    yield from ("", "## Saved under one strategy, resumed under the next", "")
    yield from _paragraph(
        f"""Each training is saved after {EPOCH_STEPS} batches ({_SAVED_LATER}). The next strategy to the right that
        does not refuse the model, in the same environment, loads the checkpoint into a model with different initial
        weights and trains it to the end; after the last strategy comes the first. The differences are from the
        hand-written loop, which was never interrupted."""
    )
    yield from _table(results.resumed, notes)
    yield ""
    yield from notes.lines()


def _device_paragraph(results: Results, on_device: Results) -> list[str]:
    if not on_device.trained:
        return []
    kinds = Counter(verdict(cell) for cells in on_device.trained.values() for cell in cells.values())
    resumed = Counter(verdict(cell) for cells in on_device.resumed.values() for cell in cells.values())
    other = [
        f"{row} under {name}"
        for row, cells in on_device.trained.items()
        for name, cell in cells.items()
        if verdict(cell) != verdict(results.trained[row][name])
    ]
    columns = {name for cells in on_device.trained.values() for name in cells}
    return _paragraph(
        f"""`make test-models-device` trains {len(on_device.trained)} of them on the simulated accelerator of `make
        test-device`, whose backend has NCCL's rules, under the {len(columns)} strategies that are torch's own, and
        compares with the same loop on the CPU: of {kinds.total()} trainings {kinds["same"]} have the same numbers and
        {kinds["refused"]} are refused,
        {f"as here but for {', '.join(other)}" if other else "the same ones as here"}. {resumed["same"]} checkpoints
        went on there. The figures are in benchmarks/models-sim.json."""
    )


def _paragraph(text: str) -> list[str]:
    return [*_wrapped(" ".join(text.split())), ""]


def _wrapped(text: str, subsequent_indent: str = "") -> list[str]:
    return wrap(text, 120, subsequent_indent=subsequent_indent, break_long_words=False, break_on_hyphens=False)


_SAVED_LATER = "; ".join(f"{row.name}: {row.saved_after}" for row in ROWS if row.saved_after != EPOCH_STEPS)
_WHAT = {"loss": "losses", "norm": "norms", "weights": "weights", "validated": "the validated number"}
_ENGINES = {"torch": "torch's own strategies", "deepspeed": "DeepSpeed", "colossalai": "ColossalAI"}


class _Notes:
    """Sentences that a table refers to by numbers."""

    def __init__(self) -> None:
        self._sentences: list[str] = []

    def number(self, sentence: str) -> int:
        if sentence not in self._sentences:
            self._sentences.append(sentence)
        return self._sentences.index(sentence) + 1

    def lines(self) -> Iterator[str]:
        if self._sentences:
            yield from ("## Refusals and warnings", "")
        yield from (f"{number}. {sentence}" for number, sentence in enumerate(self._sentences, 1))


def _table(cells: Cells, notes: _Notes) -> Iterator[str]:
    yield "| model | " + " | ".join(column.name for column in COLUMNS) + " |"
    yield "|---|" + "--:|" * len(COLUMNS)
    for row in ROWS:
        found = cells.get(row.name, {})
        yield f"| {row.name} | " + " | ".join(_cell(found.get(column.name), notes) for column in COLUMNS) + " |"


def _cell(outcome: Outcome | None, notes: _Notes) -> str:
    if outcome is None:
        return "not run"
    kind = verdict(outcome)
    if kind == "refused":
        return f"refused ({notes.number(_sentence(outcome['refused']))})"
    under = f" ({outcome['under']})" if "under" in outcome else ""
    told = f", but ({notes.number(_sentence(outcome['told']))})" if "told" in outcome else ""
    return f"{kind}{under}" if kind in ("wrong", "failed") else f"{_figure(worst(outcome))}{told}{under}"


def _sentence(message: str) -> str:
    return " ".join(message.split()).replace("|", "\\|")


def _figure(value: float) -> str:
    return "0" if value == 0 else f"{value:.0e}".replace("e-0", "e-")
