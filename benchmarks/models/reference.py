"""Loops by hand: what every training must come to. Plain torch in one process, in each environment anew."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from benchmarks.models.data import output_sizes
from benchmarks.models.row import EPOCH_STEPS, EPOCHS, GLOBAL_BATCH, MAX_NORM, VALIDATED, Row
from benchmarks.models.rows import BY_NAME


class Update:
    """Backward pass, clipping and optimizer, of a model as a whole or of its parts."""

    def __init__(self, row: Row, model: nn.Module) -> None:
        options = {key: value for key, value in row.optimizer.items() if key != "type"}
        named = row.optimizer["type"]
        kind = getattr(torch.optim, named) if isinstance(named, str) else named
        parts = {name: model.get_submodule(name) for name in row.parts} or {"": model}
        self.optimizers = {name: kind(part.parameters(), **options) for name, part in parts.items()}
        self.parts = parts
        self.model = model
        self.clips = row.clips
        self.window, self.passes = row.accumulative_counts, 0
        self.norms: dict[str, float] = {}

    def __call__(self, loss: Tensor, part: str = "") -> None:
        """Run a backward pass; update at the end of a window."""
        if self.passes % self.window == 0:
            self.model.zero_grad()
        self.backward(loss / self.window)
        self.passes += 1
        if self.passes % self.window == 0:
            self.step(part)

    def backward(self, loss: Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]

    def step(self, part: str = "") -> None:
        """Clip the gradients, update, and clear them."""
        if self.clips:
            self.norms[part] = clip_grad_norm_(self.parts[part].parameters(), MAX_NORM).item()
        self.optimizers[part].step()
        self.model.zero_grad()


def train(row: Row) -> dict[str, Any]:
    """Return losses and norms of every step, the validated number, and the weights at the end."""
    model, samples = row.build(), row.samples(training=True)
    update = Update(row, model)
    losses, norms = [], []
    for epoch in range(EPOCHS):
        model.train()
        if row.epoch_by_hand is not None:
            row.epoch_by_hand(model, epoch)
        for step in range(EPOCH_STEPS):
            batch = samples.batch(step * GLOBAL_BATCH, (step + 1) * GLOBAL_BATCH)
            found = row.by_hand(model, batch, update)
            losses.append({name: loss.item() for name, loss in found.items()})
            norms.append(dict(update.norms))
    model.eval()
    validation = row.samples(training=False)
    with torch.no_grad():
        sizes = output_sizes(model(**validation.batch(0, VALIDATED)))
    return {"losses": losses, "norms": norms, "validated": sum(sizes) / len(sizes), "state": model.state_dict()}


def save(row_name: str, path: Path) -> dict[str, Any]:
    """Train one model by hand, and save what that came to."""
    try:
        torch.save(train(BY_NAME[row_name]), path)
    except Exception:
        return {"failed": f"by hand\n{traceback.format_exc()}"}
    return {}
