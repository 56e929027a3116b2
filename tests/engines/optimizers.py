"""Optimizers that no engine knows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import SGD

from lockstep.strategy import Strategy

from .parameters import Base, train_base


class TrustRatio(SGD):
    """Takes steps in proportion to the norm of a parameter."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    ratio = parameter.norm() / parameter.grad.norm().clamp(min=1e-6)
                    parameter.add_(parameter.grad, alpha=-float(group["lr"] * ratio))


class Signs(SGD):
    """Takes steps by the signs of gradients."""

    is_elementwise = True

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_(parameter.grad.sign(), alpha=-group["lr"])


class DerivedFromSigns(Signs):
    """Does not say of itself that it updates each element independently."""


def train_by(kind: type[SGD], strategy: Strategy) -> list[float]:
    """Return the losses of a few steps, as means over the ranks."""
    make: Callable[[Base], SGD] = lambda model: kind(model.parameters(), lr=0.01)  # noqa: E731
    return train_base(Base, strategy, make)[0]
