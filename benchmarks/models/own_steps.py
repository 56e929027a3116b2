"""Models that write their training step themselves, each with the same step by hand beside it."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss, softplus

from benchmarks.models.data import Batch
from benchmarks.models.own import Perceptron
from lockstep.model import BaseModel

Losses = dict[str, Tensor]


class OwnStep(BaseModel):
    """A model that counts the calls of its own `train_step`."""

    def __init__(self) -> None:
        super().__init__()
        self.steps_taken = 0


class Gan(OwnStep):
    """Two parts with an optimizer each, which the step calls one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 16))
        self.discriminator = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))

    def forward(self, inputs: Tensor, noise: Tensor, mode: str = "tensor") -> Tensor:
        return self.generator(noise)

    def train_step(self, data: Batch, optim_wrapper: Any) -> Losses:
        self.steps_taken += 1
        data = self.data_preprocessor(data, training=True)
        told = optim_wrapper["discriminator"]
        with told.optim_context(self):
            loss_real = self.discriminator_loss(data)
        told.update_params(loss_real)
        drawn = optim_wrapper["generator"]
        self.discriminator.requires_grad_(False)  # it is asked, but does not learn from the answer
        with drawn.optim_context(self):
            loss_drawn = self.generator_loss(data)
        drawn.update_params(loss_drawn)
        self.discriminator.requires_grad_(True)
        return {"loss_discriminator": loss_real.detach(), "loss_generator": loss_drawn.detach()}

    def discriminator_loss(self, data: Batch) -> Tensor:
        with torch.no_grad():
            drawn = self.generator(data["noise"])
        return (softplus(-self.discriminator(data["inputs"])) + softplus(self.discriminator(drawn))).mean()

    def generator_loss(self, data: Batch) -> Tensor:
        return softplus(-self.discriminator(self.generator(data["noise"]))).mean()


def gan_by_hand(model: Gan, batch: Batch, update: Any) -> Losses:
    loss_discriminator = model.discriminator_loss(batch)
    update(loss_discriminator, "discriminator")
    loss_generator = model.generator_loss(batch)
    update(loss_generator, "generator")
    return {"loss_discriminator": loss_discriminator, "loss_generator": loss_generator}


class Mixup(OwnStep):
    """Trained on sums of two samples; the step calls the model itself."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Perceptron()

    def forward(self, inputs: Tensor, mode: str = "tensor", **_: Tensor) -> Tensor:
        return self.net(inputs)

    def train_step(self, data: Batch, optim_wrapper: Any) -> Losses:
        self.steps_taken += 1
        data = self.data_preprocessor(data, training=True)
        with optim_wrapper.optim_context(self):
            loss = mixed_loss(self(mixed(data)), data)
        optim_wrapper.update_params(loss)
        return {"loss": loss.detach()}


def mixed(data: Batch) -> Tensor:
    share = data["share"][:, None]
    return share * data["inputs"] + (1 - share) * data["partners"]


def mixed_loss(scores: Tensor, data: Batch) -> Tensor:
    own = cross_entropy(scores, data["labels"], reduction="none")
    other = cross_entropy(scores, data["partner_labels"], reduction="none")
    return (data["share"] * own + (1 - data["share"]) * other).mean()


def mixup_by_hand(model: Mixup, batch: Batch, update: Any) -> Losses:
    loss = mixed_loss(model.net(mixed(batch)), batch)
    update(loss)
    return {"loss": loss}


class Distillation(OwnStep):
    """A student that also learns from the mean of what it was before: a frozen submodule, moved along in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.student = Perceptron()
        self.teacher = deepcopy(self.student).requires_grad_(False)

    def forward(self, inputs: Tensor, labels: Tensor | None = None, mode: str = "tensor") -> Tensor:
        return self.student(inputs)

    def train_step(self, data: Batch, optim_wrapper: Any) -> Losses:
        self.steps_taken += 1
        data = self.data_preprocessor(data, training=True)
        with optim_wrapper.optim_context(self):
            scores = self(data["inputs"])
            with torch.no_grad():
                wanted = self.teacher(data["inputs"])
            losses = distillation_losses(scores, wanted, data["labels"])
        optim_wrapper.update_params(losses["loss"])
        self.move_teacher()
        return {name: loss.detach() for name, loss in losses.items()}

    @torch.no_grad()
    def move_teacher(self) -> None:
        for mean, present in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            mean.lerp_(present, 0.1)


def distillation_losses(scores: Tensor, wanted: Tensor, labels: Tensor) -> Losses:
    of_labels, of_teacher = cross_entropy(scores, labels), mse_loss(scores, wanted)
    return {"loss_labels": of_labels, "loss_teacher": of_teacher, "loss": of_labels + of_teacher}


def distillation_by_hand(model: Distillation, batch: Batch, update: Any) -> Losses:
    with torch.no_grad():
        wanted = model.teacher(batch["inputs"])
    losses = distillation_losses(model.student(batch["inputs"]), wanted, batch["labels"])
    update(losses["loss"])
    model.move_teacher()
    return losses
