"""Weights that something other than the optimizer writes: a hook after each update, or a forward pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from benchmarks.models import data
from benchmarks.models.data import CLASSES, VOCABULARY, Batch
from benchmarks.models.own import WIDTH, Classifier, Perceptron
from benchmarks.models.row import PERCEPTRON, Losses, Row, plain_step
from lockstep.hooks import Hook
from lockstep.model import unwrap_model


@torch.no_grad()
def clamp(model: Any) -> None:
    """Keep the weights of a layer small."""
    model.up.weight.clamp_(-0.1, 0.1)


class Clamping(Hook):
    """Keeps weights small after each update."""

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        clamp(unwrap_model(runner.model))


def clamped_by_hand(model: nn.Module, batch: Batch, update: Any) -> Losses:
    losses = plain_step(model, batch, update)
    clamp(model)
    return losses


class ShortWords(Classifier):
    """A mean of word vectors that `nn.Embedding` shortens when they are looked up."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, WIDTH, max_norm=1.0)
        self.up = nn.Linear(WIDTH, WIDTH)
        self.down = nn.Linear(WIDTH, CLASSES)

    def scores(self, inputs: Tensor) -> Tensor:
        return self.down(silu(self.up(self.words(inputs).mean(1))))


class ActNorm(nn.Module):
    """Shift and scale that the first batch decides about, as in Glow."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(width))
        self.scale = nn.Parameter(torch.ones(width))
        self.register_buffer("is_initialized", torch.zeros((), dtype=torch.bool))

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training and not self.is_initialized:
            with torch.no_grad():
                self.shift.copy_(-inputs.mean(0))
                self.scale.copy_(1 / (inputs.std(0) + 1e-3))
                self.is_initialized.fill_(True)
        return (inputs + self.shift) * self.scale


class Normalized(Classifier):
    """A perceptron with an `ActNorm`."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(16, WIDTH)
        self.norm = ActNorm(WIDTH)
        self.down = nn.Linear(WIDTH, CLASSES)

    def scores(self, inputs: Tensor) -> Tensor:
        return self.down(silu(self.norm(self.up(inputs))))


ROWS = (
    Row(
        "clamped weights",
        Perceptron,
        data.vector_columns,
        clamped_by_hand,
        hooks=(Clamping,),
        plan=PERCEPTRON,
        updates_before=1,
        note="a hook calls `clamp_` on a layer's weight after each update, as for the critic of a WGAN.",
    ),
    Row("Embedding, max_norm", ShortWords, data.word_columns, plan=PERCEPTRON),
    Row(
        "ActNorm",
        Normalized,
        data.vector_columns,
        note="the forward pass of the first batch writes two parameters, from the samples of one rank.",
    ),
)
