"""A model and how it is trained: what a hand-written loop and a config have in common."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Generator, Tensor, nn

from benchmarks.models.data import Batch, Samples
from lockstep.hooks import Hook

EPOCHS, EPOCH_STEPS, GLOBAL_BATCH, VALIDATED = 2, 5, 8, 13
STEPS = EPOCHS * EPOCH_STEPS
MAX_NORM = 0.1
# A larger eps than usual, lest Adam make a step of the rounding errors of gradients that are 0, as those of the biases
# of attention's keys are; and so that clipping changes something, which Adam would divide out again.
ADAMW = {"type": "AdamW", "lr": 3e-3, "eps": 1e-4, "weight_decay": 0.05}

PERCEPTRON = {"*up": "colwise", "*down": "rowwise"}
"""How a `Perceptron` is split where ranks compute it together."""
UNUSED = {"DDP-2": {"find_unused_parameters": True}}
UNUSED_NOTE = "Under `ddp` with `find_unused_parameters=True`."

Losses = dict[str, Tensor]
Columns = Callable[[int, Generator], Batch]
# Calls `update(loss)`, or `update(loss, part)` for the optimizer of one part, or `update.backward` and `update.step`;
# returns losses by name.
ByHand = Callable[[Any, Batch, Any], Losses]


def plain_step(model: nn.Module, batch: Batch, update: Any) -> Losses:
    """Train on one batch with a model that returns its loss."""
    mode = {"mode": "loss"} if "mode" in inspect.signature(model.forward).parameters else {}
    loss = model(**batch, **mode)["loss"]
    update(loss)
    return {"loss": loss}


@dataclass(frozen=True)
class Row:
    """A model, and how it is trained.

    Attributes:
        name: in the tables.
        make: makes it, with torch's random numbers.
        columns: draws so many samples.
        by_hand: one training step in plain torch.
        optimizer: config of the optimizer; its type is a name of `torch.optim`, or a class.
        parts: names of the parts that have an optimizer each; empty for one optimizer.
        clips: whether gradients are clipped; torch can't clip sparse ones.
        accumulative_counts: number of backward passes of an update.
        counts: what a batch counts for; None for its samples.
        plan: how it is split where ranks compute it together; None leaves it to the model.
        options: what a config says of a strategy besides, by column.
        hooks: make further hooks.
        epoch_by_hand: what they do, by hand, before an epoch.
        cfg: further keys of a config.
        updates_before: number of updates before what is special about it begins; it can't be refused earlier.
        saved_after: number of batches after which a checkpoint is saved.
        note: what to know of it, for the page.
    """

    name: str
    make: Callable[[], nn.Module]
    columns: Columns
    by_hand: ByHand = plain_step
    optimizer: Mapping[str, Any] = field(default_factory=lambda: ADAMW)
    parts: tuple[str, ...] = ()
    clips: bool = True
    accumulative_counts: int = 1
    counts: Callable[[Batch], int] | None = None
    plan: Mapping[str, str] | None = None
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    hooks: tuple[Callable[[], Hook], ...] = ()
    epoch_by_hand: Callable[[Any, int], None] | None = None
    cfg: Mapping[str, Any] = field(default_factory=dict)
    updates_before: int = 0
    saved_after: int = EPOCH_STEPS
    note: str = ""

    def build(self, seed: int = 0) -> nn.Module:
        """Return the model as a seed makes it, no parameter of which is 0 or 1 everywhere."""
        torch.manual_seed(seed)
        model = self.make()
        generator = torch.Generator().manual_seed(seed + 1)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.02 * torch.randn(parameter.shape, dtype=parameter.dtype, generator=generator))
        return model

    def samples(self, *, training: bool) -> Samples:
        """Return the data."""
        count = EPOCH_STEPS * GLOBAL_BATCH if training else VALIDATED
        return Samples(self.columns(count, torch.Generator().manual_seed(7 if training else 8)))
