"""Several forward passes, backward passes or updates for one batch, each with the same by hand."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, log_softmax, mse_loss

from benchmarks.models import data
from benchmarks.models.data import CLASSES, VOCABULARY, Batch
from benchmarks.models.own import Perceptron
from benchmarks.models.own_steps import OwnStep
from benchmarks.models.row import PERCEPTRON, Losses, Row
from lockstep import dist


class Maml(nn.Module):
    """Learns weights from which one gradient step is enough to know a task; the step is differentiated, too."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Perceptron(1, 16, 1)

    def forward(self, given: Tensor, given_values: Tensor, asked: Tensor, values: Tensor, mode: str = "tensor") -> Any:
        answers = torch.stack([self.answers(*task, mode) for task in zip(given, given_values, asked, strict=True)])
        return {"loss": mse_loss(answers, values)} if mode == "loss" else answers

    def answers(self, given: Tensor, given_values: Tensor, asked: Tensor, mode: str) -> Tensor:
        """Return what the network says after a step for this task."""
        weights = dict(self.net.named_parameters())
        with torch.enable_grad():
            loss = mse_loss(self.net(given), given_values)
            gradients = torch.autograd.grad(loss, list(weights.values()), create_graph=mode == "loss")
        learned = {name: own - 0.1 * way for (name, own), way in zip(weights.items(), gradients, strict=True)}
        return torch.func.functional_call(self.net, learned, asked)


class Recurrent(OwnStep):
    """Predicts the next token; its state goes on over parts of a text, but gradients do not."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, 16)
        self.memory = nn.LSTM(16, 32, batch_first=True)
        self.head = nn.Linear(32, VOCABULARY)

    def forward(
        self, input_ids: Tensor, state: tuple[Tensor, Tensor] | None = None, mode: str = "tensor", **_: Tensor
    ) -> Any:
        found, state = self.memory(self.tokens(input_ids), state)
        return (self.head(found), state) if mode == "loss" else self.head(found)

    def train_step(self, data: Batch, optim_wrapper: Any) -> Losses:
        self.steps_taken += 1
        data = self.data_preprocessor(data, training=True)
        state, losses = None, []
        for part, following in parts_of(data["input_ids"]):
            with optim_wrapper.optim_context(self):
                scores, state = self(part, state, mode="loss")
                loss = cross_entropy(scores.flatten(0, 1), following.flatten())
            optim_wrapper.update_params(loss)
            state = tuple(one.detach() for one in state)
            losses.append(loss.detach())
        return {"loss": torch.stack(losses).mean()}


def parts_of(texts: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Return texts in pieces of four tokens, each with the tokens that follow them."""
    return list(zip(texts[:, :8].split(4, 1), texts[:, 1:9].split(4, 1), strict=True))


def recurrent_by_hand(model: Recurrent, batch: Batch, update: Any) -> Losses:
    state, losses = None, []
    for part, following in parts_of(batch["input_ids"]):
        scores, state = model(part, state, mode="loss")
        losses.append(cross_entropy(scores.flatten(0, 1), following.flatten()))
        update(losses[-1])
        state = tuple(one.detach() for one in state)
    return {"loss": torch.stack(losses).mean()}


class Policy(OwnStep):
    """A recurrent policy and its critic, trained twice on each batch of episodes by PPO's clipped ratio."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = nn.GRU(6, 16, batch_first=True)
        self.actor = nn.Linear(16, CLASSES)
        self.critic = nn.Linear(16, 1)

    def forward(self, seen: Tensor, mode: str = "tensor", **_: Tensor) -> Tensor:
        found, _state = self.memory(seen)
        return torch.cat([self.actor(found), self.critic(found)], 2)

    def train_step(self, data: Batch, optim_wrapper: Any) -> Losses:
        self.steps_taken += 1
        data = self.data_preprocessor(data, training=True)
        moments = torch.stack([data["advantages"].mean(), data["advantages"].square().mean()])
        dist.all_reduce(moments, "mean")
        with torch.no_grad():
            before = self.chances(self(**data), data)
        losses = []
        for _epoch in range(2):
            with optim_wrapper.optim_context(self):
                loss = self.loss(self(**data), data, before, moments)
            optim_wrapper.update_params(loss)
            losses.append(loss.detach())
        return {"loss_first": losses[0], "loss_second": losses[1]}

    def chances(self, outputs: Tensor, data: Batch) -> Tensor:
        """Return the logarithms of the probabilities of what was done."""
        return log_softmax(outputs[..., :CLASSES], 2).gather(2, data["actions"][..., None])[..., 0]

    def loss(self, outputs: Tensor, data: Batch, before: Tensor, moments: Tensor) -> Tensor:
        mean, square = moments
        advantages = (data["advantages"] - mean) / (square - mean.square()).sqrt()
        ratio = (self.chances(outputs, data) - before).exp()
        gained = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()
        return 0.5 * mse_loss(outputs[..., -1], data["returns"]) - gained


def policy_by_hand(model: Policy, batch: Batch, update: Any) -> Losses:
    moments = torch.stack([batch["advantages"].mean(), batch["advantages"].square().mean()])
    with torch.no_grad():
        before = model.chances(model(**batch), batch)
    losses = []
    for _epoch in range(2):
        losses.append(model.loss(model(**batch), batch, before, moments))
        update(losses[-1])
    return {"loss_first": losses[0], "loss_second": losses[1]}


class TwoSteps(OwnStep):
    """Takes two steps for each batch: one by its samples, one by their partners."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Perceptron()

    def forward(self, inputs: Tensor, mode: str = "tensor", **_: Tensor) -> Tensor:
        return self.net(inputs)

    def train_step(self, data: Batch, optim_wrapper: Any) -> Losses:
        self.steps_taken += 1
        data = self.data_preprocessor(data, training=True)
        with optim_wrapper.optim_context(self):
            first = cross_entropy(self(data["inputs"]), data["labels"])
        optim_wrapper.update_params(first)
        with optim_wrapper.optim_context(self):
            second = cross_entropy(self(data["partners"]), data["partner_labels"])
        optim_wrapper.update_params(second)
        return {"loss_first": first.detach(), "loss_second": second.detach()}


def two_steps_by_hand(model: TwoSteps, batch: Batch, update: Any) -> Losses:
    first = cross_entropy(model(batch["inputs"]), batch["labels"])
    update(first)
    second = cross_entropy(model(batch["partners"]), batch["partner_labels"])
    update(second)
    return {"loss_first": first, "loss_second": second}


class TwoPasses(TwoSteps):
    """Runs two backward passes for one update, so that the graph of the first is freed before the second is built."""

    def train_step(self, data: Batch, optim_wrapper: Any) -> Losses:
        self.steps_taken += 1
        data = self.data_preprocessor(data, training=True)
        with optim_wrapper.optim_context(self):
            first = cross_entropy(self(data["inputs"]), data["labels"])
        optim_wrapper.backward(optim_wrapper.scale_loss(first))
        with optim_wrapper.optim_context(self):
            second = cross_entropy(self(data["partners"]), data["partner_labels"])
        optim_wrapper.backward(optim_wrapper.scale_loss(second))
        optim_wrapper.step()
        optim_wrapper.zero_grad()
        return {"loss_first": first.detach(), "loss_second": second.detach()}


def two_passes_by_hand(model: TwoPasses, batch: Batch, update: Any) -> Losses:
    first = cross_entropy(model(batch["inputs"]), batch["labels"])
    update.backward(first)
    second = cross_entropy(model(batch["partners"]), batch["partner_labels"])
    update.backward(second)
    update.step()
    return {"loss_first": first, "loss_second": second}


ROWS = (
    Row(
        "MAML",
        Maml,
        data.task_columns,
        plan=PERCEPTRON,
        note="`forward` takes a gradient step for each task, by `torch.func.functional_call`, and is differentiated.",
    ),
    Row(
        "truncated backpropagation",
        Recurrent,
        data.token_columns,
        recurrent_by_hand,
        note="an LSTM, an update after each four tokens; the state goes on, detached.",
    ),
    Row(
        "recurrent PPO",
        Policy,
        data.episode_columns,
        policy_by_hand,
        note="two updates for a batch; advantages are normalised over all ranks.",
    ),
    Row(
        "two steps, accumulated",
        TwoSteps,
        data.mixed_columns,
        two_steps_by_hand,
        accumulative_counts=4,
        saved_after=6,  # at the end of a window
        plan=PERCEPTRON,
        note="two calls of `update_params` for a batch, `accumulative_counts=4`: an update after every other batch.",
    ),
    Row(
        "two backward passes",
        TwoPasses,
        data.mixed_columns,
        two_passes_by_hand,
        plan=PERCEPTRON,
        note="two calls of `optim_wrapper.backward` before one of `step`.",
    ),
)
