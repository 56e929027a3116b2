"""Base class of both engines' strategies, whose states only the engine can assemble."""

from __future__ import annotations

from collections.abc import Set
from typing import Protocol

from lockstep.errors import ConfigError
from lockstep.strategy.base import ModelState, OptimState, Strategy


class CanonicalState(Protocol):
    """The canonical states of a model that an engine has sharded; each method is a collective."""

    def model_state(self) -> ModelState:
        """Return the model's state."""

    def optim_state(self) -> OptimState:
        """Return the optimizer's state."""

    def optim_template(self) -> ModelState:
        """Return tensors by parameter name that are sharded as the optimizer's state is to be read."""

    def load_model(self, state: ModelState) -> None:
        """Load a model's state."""

    def load_optim(self, state: OptimState) -> None:
        """Load an optimizer's state."""


class EngineStrategy(Strategy):
    """A strategy whose states an engine holds in its own shards.

    A subclass sets `_state` when a model is prepared, and `_trains` if it is prepared with an optimizer.
    """

    _state: CanonicalState | None = None
    _trains = False

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

    def _prepared(self, *, with_optimizer: bool = False) -> CanonicalState:
        if self._state is None or (with_optimizer and not self._trains):
            with_what = " with an optim wrapper" if with_optimizer else ""
            raise RuntimeError(f"{type(self).__name__}.prepare() must be called{with_what} first")
        return self._state


def require_names(state: ModelState, names: Set[str]) -> None:
    """Check that a model's state has an entry of each of these names, and no others.

    Raises:
        ConfigError: it has not.
    """
    missing, surplus = sorted(names - state.keys()), sorted(state.keys() - names)
    if missing or surplus:
        raise ConfigError(f"the model's state must fit the model, but lacks {missing} and has {surplus} besides")
