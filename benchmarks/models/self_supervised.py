"""Learning without labels, each method with the same step by hand: DINO, MoCo, and prototypes as in SwAV."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize
from torch.nn.utils.parametrizations import weight_norm

from benchmarks.models import data
from benchmarks.models.data import Batch
from benchmarks.models.own import Perceptron
from benchmarks.models.own_steps import OwnStep
from benchmarks.models.row import PERCEPTRON, Losses, Row
from lockstep import dist
from lockstep.hooks import Hook
from lockstep.model import unwrap_model


class Epochs(Hook):
    """Tells a model the epoch."""

    def before_train_epoch(self, runner: Any) -> None:
        epoch_by_hand(unwrap_model(runner.model), runner.epoch)


def epoch_by_hand(model: Any, epoch: int) -> None:
    model.epoch = epoch


class Projector(nn.Module):
    """A network with a last layer that only turns, not stretches."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Perceptron(8, 32, 16)
        self.last = weight_norm(nn.Linear(16, 8, bias=False))
        self.last.parametrizations.weight.original0.requires_grad_(False)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(normalize(self.net(inputs)))


class Dino(OwnStep):
    """A student that learns from its own mean what another view of a sample should give.

    In the first epoch its last layer has no gradient: the step sets it to None after the backward pass.
    """

    def __init__(self) -> None:
        super().__init__()
        self.student = Projector()
        self.teacher = deepcopy(self.student).requires_grad_(False)
        self.register_buffer("center", torch.zeros(8))
        self.epoch = 0

    def forward(self, inputs: Tensor, mode: str = "tensor", **_: Tensor) -> Tensor:
        views = torch.cat([inputs[:, :8], inputs[:, 8:]])
        return torch.cat(self.student(views).chunk(2), 1)

    def train_step(self, data: Batch, optim_wrapper: Any) -> Losses:
        self.steps_taken += 1
        data = self.data_preprocessor(data, training=True)
        with optim_wrapper.optim_context(self):
            scores = self(**data)
            loss, wanted = self.loss(scores, data)
        optim_wrapper.backward(optim_wrapper.scale_loss(loss))
        self.keep_last_layer()
        optim_wrapper.step()
        optim_wrapper.zero_grad()
        mean = wanted.mean(0)
        dist.all_reduce(mean, "mean")
        self.move(mean)
        return {"loss": loss.detach()}

    def loss(self, scores: Tensor, data: Batch) -> tuple[Tensor, Tensor]:
        """Return the loss of two views, each with the teacher's answer to the other; and these answers."""
        first, second = data["inputs"][:, :8], data["inputs"][:, 8:]
        with torch.no_grad():
            wanted = self.teacher(torch.cat([second, first]))
            shares = ((wanted - self.center) / 0.2).softmax(1)
        return cross_entropy(torch.cat(scores.chunk(2, 1)) / 0.5, shares), wanted

    def keep_last_layer(self) -> None:
        if self.epoch < 1:
            for parameter in self.student.last.parameters():
                parameter.grad = None

    @torch.no_grad()
    def move(self, mean: Tensor) -> None:
        """Move the teacher towards the student, and the centre towards the mean answer."""
        self.center.lerp_(mean, 0.1)
        for old, present in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            old.lerp_(present, 0.1)


def dino_by_hand(model: Dino, batch: Batch, update: Any) -> Losses:
    loss, wanted = model.loss(model(**batch), batch)
    update.backward(loss)
    model.keep_last_layer()
    update.step()
    model.move(wanted.mean(0))
    return {"loss": loss}


class Moco(OwnStep):
    """Tells a sample's other view from the samples of batches before, which a buffer holds."""

    def __init__(self) -> None:
        super().__init__()
        self.query = Perceptron(8, 32, 8)
        self.key = deepcopy(self.query).requires_grad_(False)
        self.register_buffer("queue", normalize(torch.randn(32, 8)))
        self.register_buffer("place", torch.zeros((), dtype=torch.long))

    def forward(self, inputs: Tensor, mode: str = "tensor", **_: Tensor) -> Tensor:
        return normalize(self.query(inputs[:, :8]))

    def train_step(self, data: Batch, optim_wrapper: Any) -> Losses:
        self.steps_taken += 1
        data = self.data_preprocessor(data, training=True)
        with optim_wrapper.optim_context(self):
            queries = self(**data)
            loss, keys = self.loss(queries, data)
        optim_wrapper.update_params(loss)
        # Sample i of rank r is sample i * ranks + r of all.
        self.move(torch.stack(dist.all_gather(keys), 1).flatten(0, 1))
        return {"loss": loss.detach()}

    def loss(self, queries: Tensor, data: Batch) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            keys = normalize(self.key(data["inputs"][:, 8:]))
        scores = torch.cat([(queries * keys).sum(1, keepdim=True), queries @ self.queue.T], 1) / 0.2
        return cross_entropy(scores, torch.zeros(len(scores), dtype=torch.long)), keys

    @torch.no_grad()
    def move(self, keys: Tensor) -> None:
        """Move the key network towards the other, and put keys in the place of the oldest."""
        self.queue[int(self.place) :][: len(keys)] = keys
        self.place.copy_((self.place + len(keys)) % len(self.queue))
        for old, present in zip(self.key.parameters(), self.query.parameters(), strict=True):
            old.lerp_(present, 0.1)


def moco_by_hand(model: Moco, batch: Batch, update: Any) -> Losses:
    loss, keys = model.loss(model(**batch), batch)
    update(loss)
    model.move(keys)
    return {"loss": loss}


class Prototypes(OwnStep):
    """Brings two views of a sample near the same prototypes, which the step scales to a length of 1 first."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Perceptron(8, 32, 16)
        self.prototypes = nn.Linear(16, 6, bias=False)

    def forward(self, inputs: Tensor, mode: str = "tensor", **_: Tensor) -> Tensor:
        views = torch.cat([inputs[:, :8], inputs[:, 8:]])
        return torch.cat(self.prototypes(normalize(self.net(views))).chunk(2), 1)

    def train_step(self, data: Batch, optim_wrapper: Any) -> Losses:
        self.steps_taken += 1
        data = self.data_preprocessor(data, training=True)
        self.normalize_prototypes()
        with optim_wrapper.optim_context(self):
            loss = swapped_loss(self(**data))
        optim_wrapper.update_params(loss)
        return {"loss": loss.detach()}

    @torch.no_grad()
    def normalize_prototypes(self) -> None:
        weight = self.prototypes.weight
        weight.copy_(normalize(weight, dim=1))


def swapped_loss(scores: Tensor) -> Tensor:
    first, second = (view / 0.3 for view in scores.chunk(2, 1))
    return cross_entropy(first, second.detach().softmax(1)) + cross_entropy(second, first.detach().softmax(1))


def prototypes_by_hand(model: Prototypes, batch: Batch, update: Any) -> Losses:
    model.normalize_prototypes()
    loss = swapped_loss(model(**batch))
    update(loss)
    return {"loss": loss}


ROWS = (
    Row(
        "DINO",
        Dino,
        data.vector_columns,
        dino_by_hand,
        plan=PERCEPTRON,
        hooks=(Epochs,),
        epoch_by_hand=epoch_by_hand,
        note="a teacher that follows, a centre over all ranks; the last layer's gradient is set to None at first.",
    ),
    Row(
        "MoCo",
        Moco,
        data.vector_columns,
        moco_by_hand,
        note="a queue of the keys of all ranks, and a network for keys that follows.",
    ),
    Row(
        "prototypes of SwAV",
        Prototypes,
        data.vector_columns,
        prototypes_by_hand,
        plan=PERCEPTRON,
        note="the step writes into a weight before each forward pass: its rows are of length 1.",
    ),
)
