"""Steps that run several backward passes before an update, or change gradients before it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .own_steps import Plain


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
