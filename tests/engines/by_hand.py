"""Steps that run several backward passes before an update, or change gradients before it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .own_steps import SAMPLES, SGD, Plain, X, Y


class SeveralBackwards(Plain):
    """Adds the gradients of three losses."""

    losses = 3

    def train_step(self, data: Any, optim_wrapper: Any) -> dict[str, Tensor]:
        x, y = data
        total = torch.zeros(())
        for inputs in (x, x.flip(1), -x)[: self.losses]:
            with optim_wrapper.optim_context(self):
                loss = self(inputs, y, mode="loss")["loss"]
            optim_wrapper.backward(loss)
            total = total + loss.detach()
        self.change_gradients(optim_wrapper)
        optim_wrapper.step()
        optim_wrapper.zero_grad()
        return {"loss": total}

    def change_gradients(self, optim_wrapper: Any) -> None:
        """Do nothing."""


class DropsGradient(SeveralBackwards):
    """Leaves its last layer out of the update."""

    losses = 1

    def change_gradients(self, optim_wrapper: Any) -> None:
        self.head.weight.grad = None


class ClipsByHand(SeveralBackwards):
    """Clips by a function of torch's."""

    losses = 1

    def change_gradients(self, optim_wrapper: Any) -> None:
        nn.utils.clip_grad_norm_(self.parameters(), 0.1)


class ClearsGradients(SeveralBackwards):
    """Clears what it has, and begins anew."""

    losses = 1

    def change_gradients(self, optim_wrapper: Any) -> None:
        optim_wrapper.zero_grad()


class ClipsInWindow(Plain):
    """Clips by a function of torch's after each batch of a window of two."""

    def train_step(self, data: Any, optim_wrapper: Any) -> dict[str, Tensor]:
        x, y = data
        with optim_wrapper.optim_context(self):
            loss = self(x, y, mode="loss")["loss"]
        optim_wrapper.update_params(loss)
        if not optim_wrapper.should_update():
            nn.utils.clip_grad_norm_(self.parameters(), 0.1)
        return {"loss": loss.detach()}


class DropsInWindow(ClipsInWindow):
    """Leaves its last layer out of each first batch of a window of two."""

    def train_step(self, data: Any, optim_wrapper: Any) -> dict[str, Tensor]:
        x, y = data
        with optim_wrapper.optim_context(self):
            loss = self(x, y, mode="loss")["loss"]
        optim_wrapper.update_params(loss)
        if not optim_wrapper.should_update():
            self.head.weight.grad = None
        return {"loss": loss.detach()}


def require_refused_in_window(strategy: Any, kind: type[Plain]) -> None:
    """Take two batches of a window, of which the second must not be reached with changed gradients."""
    model, optim_wrapper = strategy.prepare(kind(), {**SGD, "accumulative_counts": 2})
    optim_wrapper.initialize_count_status(model, 0, 2)
    for first in (0, SAMPLES):
        model.train_step((X[first : first + SAMPLES], Y[first : first + SAMPLES]), optim_wrapper)
