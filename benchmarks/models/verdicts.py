"""What is to be thought of an outcome: the same numbers, refused, wrong or failed."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from benchmarks.models.processes import Outcome

# Relative: of losses and norms, over all updates; of weights, to the largest of each tensor; of the validated number.
TOLERANCES = {"loss": 1e-5, "norm": 1e-5, "weights": 1e-4, "validated": 1e-5}

Verdict = Literal["same", "refused", "wrong", "failed"]
Cells = dict[str, dict[str, Outcome]]  # by model and strategy


@dataclass
class Results:
    """What was found.

    Attributes:
        trained: of each model under each strategy.
        resumed: where a checkpoint of that cell went on, `under` another strategy.
        made: with which versions.
    """

    trained: Cells = field(default_factory=dict)
    resumed: Cells = field(default_factory=dict)
    made: dict[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> Results:
        return cls(**json.loads(path.read_text())) if path.exists() else cls()

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(vars(self), indent=1, sort_keys=True) + "\n")

    def update(self, newer: Results) -> None:
        """Put what was found later in the place of what was found before."""
        for mine, other in ((self.trained, newer.trained), (self.resumed, newer.resumed)):
            for row, cells in other.items():
                mine.setdefault(row, {}).update(cells)
        self.made |= newer.made

    def bad(self) -> list[str]:
        """Return a line for each cell that is wrong or has failed."""
        lines = []
        for row, cells in self.trained.items():
            lines += [f"{row}, {name}: {described(cell)}" for name, cell in cells.items() if _is_bad(cell)]
        for row, cells in self.resumed.items():
            lines += [
                f"{row}, saved by {name}, resumed under {cell.get('under')}: {described(cell)}"
                for name, cell in cells.items()
                if _is_bad(cell)
            ]
        return lines


def verdict(outcome: Outcome) -> Verdict:
    """Return what is to be thought of an outcome."""
    if "refused" in outcome:
        return "refused"
    if "failed" in outcome:
        return "failed"
    return "wrong" if _faults(outcome) else "same"


def worst(outcome: Mapping[str, Any]) -> float:
    """Return the largest of the relative differences."""
    return max(outcome[name] for name in TOLERANCES if outcome[name] is not None)


def described(outcome: Outcome) -> str:
    """Return a verdict in a line, with its reason."""
    kind = verdict(outcome)
    if kind == "refused":
        return f"refused: {outcome['refused']}"
    if kind == "failed":
        lines = outcome["failed"].splitlines()
        errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Exit|Interrupt|Warning)\b", line)]
        return f"failed: {errors[-1] if errors else lines[0]}"
    but = f", but {outcome['told']}" if "told" in outcome else ""
    return f"{kind}: {'; '.join(_faults(outcome)) or f'{worst(outcome):.0e}'}{but}"


def _is_bad(outcome: Outcome) -> bool:
    return verdict(outcome) in ("wrong", "failed")


def _faults(outcome: Outcome) -> list[str]:
    faults = [
        f"{name} differs by {outcome[name]:.1e}" + (f" ({outcome['worst_weight']})" if name == "weights" else "")
        for name, limit in TOLERANCES.items()
        if outcome[name] is not None and not outcome[name] <= limit
    ]
    if outcome["steps"] not in (None, outcome["updates"]):
        faults.append(f"its train_step was called {outcome['steps']} times for {outcome['updates']} batches")
    return faults
