"""What both engines' strategies share: their states, which only the engine can assemble."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lockstep.device import get_device
from lockstep.errors import ConfigError, listed
from lockstep.model import is_model_wrapper
from lockstep.model.shards import gather_full
from lockstep.strategy.base import ModelState, OptimState, Strategy, refuse_meta


class EngineState:
    """The canonical states of a model that an engine has sharded; each method is a collective.

    A subclass reads and writes what an engine holds. This class serves for a model that is only evaluated.

    Args:
        core: the user's own module, as the engine has left it.
        optimizer: the torch optimizer that runs the engine's updates; None for a model that is only evaluated.
    """

    def __init__(self, core: nn.Module, optimizer: Any = None) -> None:
        self._core = core
        self._optimizer = optimizer

    @property
    def trains(self) -> bool:
        """Whether there is an optimizer."""
        return self._optimizer is not None

    def model_state(self) -> ModelState:
        """Return the model's state, in the precision in which it is trained."""
        whole: dict[int, Any] = {}  # tied weights are gathered once
        state: ModelState = {}
        for name, own in self._core.state_dict(keep_vars=True).items():
            if id(own) not in whole:
                whole[id(own)] = self._canonical(own)
            state[name] = whole[id(own)]
        return state

    @torch.no_grad()
    def load_model(self, state: ModelState) -> None:
        """Load a model's state.

        Raises:
            ConfigError: the state belongs to another model.
        """
        present: dict[str, Any] = self._core.state_dict(keep_vars=True)
        missing, surplus = sorted(present.keys() - state.keys()), sorted(state.keys() - present.keys())
        if missing or surplus:
            raise ConfigError(
                f"the model's state must fit the model, but lacks [{listed(missing)}] and has [{listed(surplus)}] "
                "besides. Load the state of this model"
            )
        rest: dict[str, Any] = {}
        for name in sorted(present):  # the same order on every rank
            value = gather_full(state[name])
            if not self._load_tensor(name, present[name], value):
                rest[name] = value
        self._core.load_state_dict(rest, strict=False)

    def optim_state(self) -> OptimState:
        """Return the optimizer's state by parameter name."""
        raise NotImplementedError

    def optim_template(self) -> ModelState:
        """Return tensors by parameter name that are sharded as the optimizer's state is to be read."""
        raise NotImplementedError

    def load_optim(self, state: OptimState) -> None:
        """Load an optimizer's state by parameter name.

        Raises:
            ConfigError: the state belongs to other parameters or another optimizer.
        """
        raise NotImplementedError

    def _canonical(self, own: Any) -> Any:
        """Return what the model's state has for an entry of this rank's."""
        return own.detach() if isinstance(own, Tensor) else own

    def _load_tensor(self, name: str, own: Any, value: Any) -> bool:
        """Write a whole tensor into this rank's part of it; return False to leave that to `load_state_dict`."""
        return False


def require_plain(model: nn.Module, engine: str) -> None:
    """Refuse a model that an engine can't wrap and lay out: one that is wrapped, or has no values yet.

    Raises:
        ConfigError: it is either.
    """
    if is_model_wrapper(model):
        raise ConfigError(
            f"`model` must not be wrapped under {engine}, whose engine wraps it, but is a {type(model).__name__}. Give "
            "the module inside; to train after an evaluation that has changed it, make another Runner"
        )
    refuse_meta(model)


def check_shape(name: str, value: Tensor, shape: torch.Size) -> None:
    """Check that a tensor of a model's state has the shape that the model has.

    Raises:
        ConfigError: it has not.
    """
    if value.shape != shape:
        raise ConfigError(
            f"`{name}` must have the shape of the model's, {tuple(shape)}, but has {tuple(value.shape)} in the state. "
            "Load the state of this model"
        )


class EngineStrategy(Strategy):
    """A strategy whose states an engine holds in its own shards.

    A subclass sets `_state` when a model is prepared with an optimizer.
    """

    _state: EngineState | None = None

    def for_evaluation(self, model: nn.Module) -> nn.Module:
        """Return the model on this rank's device, whole: no engine is needed."""
        self._state = EngineState(model.to(torch.device(get_device())))
        return model

    def model_state(self) -> ModelState:
        """Return the model's state by canonical names; tensors that the engine shards come as this rank's rows.

        **Collective**: every rank.
        """
        return self._prepared().model_state()

    def optim_state(self) -> OptimState:
        """Return the optimizer's state by canonical names; tensors that the engine shards come as this rank's rows.

        **Collective**: every rank.
        """
        return self._prepared(with_optimizer=True).optim_state()

    def optim_template(self) -> ModelState:
        """Return tensors by parameter name that are sharded as the optimizer's state is to be read."""
        return self._prepared(with_optimizer=True).optim_template()

    def load_state(self, model_state: ModelState | None = None, optim_state: OptimState | None = None) -> None:
        """Load states by canonical names, as `NativeStrategy.load_state` does.

        A tensor may be sharded in any way, or be whole on every rank. **Collective**: every rank.
        """
        if model_state is not None:
            self._prepared().load_model(model_state)
        if optim_state is not None:
            self._prepared(with_optimizer=True).load_optim(optim_state)

    def _prepared(self, *, with_optimizer: bool = False) -> EngineState:
        if self._state is None or (with_optimizer and not self._state.trains):
            with_what = " with an optim wrapper" if with_optimizer else ""
            raise RuntimeError(f"{type(self).__name__}.prepare() must be called{with_what} first")
        return self._state
