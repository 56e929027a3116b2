"""Gradients that an engine holds in pieces between a backward pass and the update, where `parameter.grad` is None.

What is done to `parameter.grad` there would have no effect: neither `parameter.grad = None`, by which a parameter is
left out of an update, nor a clipping by hand. So each such parameter gets a stand-in for its gradient, which can't be
computed with, and which must still be there at the update.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.errors import ConfigError, listed
from lockstep.groups import this_rank
from lockstep.tree import tree_leaves

_REMEDY = (
    "Clip by `clip_grad` of the optim wrapper; leave a parameter out of some updates by a group of its own at lr=0 and "
    "weight_decay=0 (paramwise_cfg); or use strategy 'ddp' or 'fsdp'"
)


class HeldGradients:
    """The stand-ins of one optim wrapper.

    Args:
        engine: name of the engine.
    """

    def __init__(self, engine: str) -> None:
        self._engine = engine
        self._held: list[tuple[str, nn.Parameter, _StandIn]] = []

    def hold(self, named: Iterable[tuple[str, nn.Parameter]]) -> None:
        """Give those of the parameters that have no gradient a stand-in."""
        for name, parameter in named:
            if parameter.grad is None:
                parameter.grad = stand_in = _StandIn(name, parameter, self._engine)
                self._held.append((name, parameter, stand_in))

    def release(self) -> None:
        """Take the stand-ins away.

        Raises:
            ConfigError: one is not there any more.
        """
        changed = [name for name, parameter, stand_in in self._held if parameter.grad is not stand_in]
        self.drop()
        if changed:
            raise ConfigError(
                f"`grad` of parameters must be left alone between a backward pass and the update under {self._engine}, "
                f"which holds gradients in pieces and would use them all the same, but was set: {listed(changed)} "
                f"({this_rank()}). {_REMEDY}"
            )

    def drop(self) -> None:
        """Take the stand-ins away, whatever has been done to them."""
        for _, parameter, _ in self._held:
            parameter.grad = None
        self._held = []


class _StandIn(Tensor):
    """Takes the place of a gradient of the parameter's shape, in the memory of one element."""

    _message: str

    @staticmethod
    def __new__(cls, name: str, parameter: nn.Parameter, engine: str) -> _StandIn:
        """Return a stand-in for the gradient of a parameter."""
        element = torch.zeros((), dtype=parameter.dtype, device=parameter.device)
        made: _StandIn = element.expand(parameter.shape).as_subclass(cls)
        made._message = (
            f"`{name}.grad` must not be used between a backward pass and the update under {engine}, which holds "
            f"gradients in pieces ({this_rank()}). {_REMEDY}"
        )
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"<{self._message}>"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refuse all functions."""
        for leaf in tree_leaves((args, kwargs or {})):
            if isinstance(leaf, cls):
                raise ConfigError(leaf._message)
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
