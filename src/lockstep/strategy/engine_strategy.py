"""What the strategies of both engines have in common: states that only the engine can put together."""

from __future__ import annotations

from typing import Protocol

from lockstep.strategy.base import ModelState, OptimState, Strategy


class CanonicalState(Protocol):
    """The states of a model that an engine has laid out, in canonical form; each method is a collective."""

    def model_state(self) -> ModelState:
        """Return the model's state."""
        ...

    def optim_state(self) -> OptimState:
        """Return the optimizer's state."""
        ...

    def optim_template(self) -> ModelState:
        """Return tensors by parameter name that are sharded as the optimizer's state is to be read."""
        ...

    def load_model(self, state: ModelState) -> None:
        """Take over a model's state."""
        ...

    def load_optim(self, state: OptimState) -> None:
        """Take over an optimizer's state."""
        ...


class EngineStrategy(Strategy):
    """A strategy whose states an engine holds in pieces of its own.

    A subclass sets `_state` when a model is prepared, and `_trains` if that is with an optimizer.
    """

    _state: CanonicalState | None = None
    _trains = False

    def model_state(self) -> ModelState:
        """Return the model's state by canonical names; of what the engine holds in pieces, this rank's rows.

        **Collective**: every rank.
        """
        return self._prepared().model_state()

    def optim_state(self) -> OptimState:
        """Return the optimizer's state by canonical names; of what the engine holds in pieces, this rank's rows.

        **Collective**: every rank.
        """
        return self._prepared(with_optimizer=True).optim_state()

    def optim_template(self) -> ModelState:
        """Return tensors by parameter name that are sharded as the optimizer's state is to be read."""
        return self._prepared(with_optimizer=True).optim_template()

    def load_state(self, model_state: ModelState | None = None, optim_state: OptimState | None = None) -> None:
        """Take over states by canonical names, as `NativeStrategy.load_state` does.

        A tensor may be sharded in any way or whole, in which case every rank has it. **Collective**: every rank.
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
