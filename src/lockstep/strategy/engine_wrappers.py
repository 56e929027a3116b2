"""What both engines' wrappers share: a model whose losses the engine sees, and updates that the engine makes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from lockstep.errors import ConfigError
from lockstep.groups import this_rank
from lockstep.model import ModelWrapper, steps
from lockstep.model.wrapper import forwarded
from lockstep.model.written import BY_RANK, DriftCheck
from lockstep.optim import OptimWrapper
from lockstep.strategy.engine_parameters import FrozenParamsGuard, GradientPlaceholders, MasterWeights
from lockstep.strategy.gradient_flow import GradientFlow
from lockstep.tree import tree_map
from lockstep.watch.failures import backend_errors_translated

_STEPS = ("train_step", "val_step", "test_step")


class EngineModelWrapper(ModelWrapper):
    """A model that is called through an engine, which also sees each loss before its backward pass.

    Engines prepare for a backward pass by hooks on the outputs of the model's forward pass. A training step of the
    user's own may call parts of the model instead, so a loss passes through the engine as if the model had returned it,
    unless the engine has seen a forward pass since the last backward pass.

    Args:
        module: the user's own module.
        engine: calls it.
        name: name of the engine.

    Attributes:
        passes_each_loss: whether each loss of a step of the user's own passes through the engine.
    """

    prepares_backward = True
    passes_each_loss = False
    _engine: Any

    def __init__(self, module: nn.Module, engine: Any, name: str) -> None:
        super().__init__()
        self.module = module
        self.__dict__["_engine"] = engine  # as a submodule it would give every parameter two names
        self._trainable = FrozenParamsGuard(module, name)
        self._has_own_step = steps.defines_step(module, "train_step")
        self._has_seen_forward = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model through the engine; an error of the backend names ranks, as in `train_step`."""
        self._has_seen_forward |= torch.is_grad_enabled()
        try:
            with self.engine_context():
                return self._engine(*args, **kwargs)
        except RuntimeError:
            with backend_errors_translated():
                raise

    @contextmanager
    def step_context(self, optim_wrapper: Any) -> Iterator[None]:
        """Return the context of one training step.

        Raises:
            ConfigError: parameters have been frozen or unfrozen since the model was prepared.
            RuntimeError: at its end, if the optim wrapper has run no backward pass.
        """
        self._trainable.check()
        self._has_seen_forward = False
        before = optim_wrapper.inner_count
        yield
        if optim_wrapper.inner_count == before:
            raise RuntimeError(
                f"`train_step` of {type(self.module).__name__} must run its backward pass by "
                "`optim_wrapper.update_params(loss)` or `optim_wrapper.backward(optim_wrapper.scale_loss(loss))`, but "
                f"has done neither ({this_rank()}): with this strategy `loss.backward()` and `optimizer.step()` train "
                "nothing. For a batch that is to change nothing, pass a loss times 0"
            )

    def engine_context(self) -> AbstractContextManager[Any]:
        """Return the context of the engine's own operations."""
        return nullcontext()

    @contextmanager
    def backward_context(self, loss: Tensor, *, syncs: bool) -> Iterator[Tensor]:
        """Give the loss that the engine has seen."""
        with self.engine_context():
            is_seen = self._has_seen_forward and not (self.passes_each_loss and self._has_own_step)
            self._has_seen_forward = False
            yield loss if is_seen else self._returned_by_engine(loss)

    def _returned_by_engine(self, loss: Tensor) -> Tensor:
        """Return the loss as the engine returns it if the model returns it."""
        with forwarded(self.module, lambda: loss):
            returned: Tensor = self._engine().clone()  # the engine's hooks belong to this output only
        return returned


class EngineOptimWrapper(OptimWrapper):
    """An optim wrapper whose backward passes and updates are made by an engine.

    The order of an update is that of `OptimWrapper`. A subclass fills in what its engine does: `_run_backward`,
    `_run_step`, `zero_grad` and `_multiply_gradients`.

    Attributes:
        engine_name: for messages.
        half_option: what selects half precision, for messages.
    """

    engine_name: ClassVar[str]
    half_option: ClassVar[str]

    _engine: Any = None
    _drift: DriftCheck | None = None
    _updates_at_once = False  # within `update_params`: no code of the user's runs between backward pass and update

    @property
    def accumulative_counts(self) -> int:
        """Number of calls of `update_params` in a window."""
        return super().accumulative_counts

    @accumulative_counts.setter
    def accumulative_counts(self, counts: int) -> None:
        if counts == self.accumulative_counts:
            return
        raise ConfigError(
            f"`accumulative_counts` must stay {self.accumulative_counts} under {self.engine_name}, which was made for "
            f"it, but was set to {counts}. Use strategy 'ddp' or 'fsdp', or resume with another number"
        )

    def attach(self, engine: Any, module: nn.Module, masters: MasterWeights, *, replicated: bool = True) -> None:
        """Set what makes the updates.

        Args:
            engine: the engine, or its optimizer.
            module: the user's own module.
            masters: the engine's master weights.
            replicated: whether each rank has all parameters whole, so that they can be compared.
        """
        self._engine, self._module = engine, module
        self._placeholders = GradientPlaceholders(self.engine_name)
        self._flow, self._masters = GradientFlow(module), masters
        self._drift = DriftCheck(lambda: [*module.named_parameters()], None, BY_RANK) if replicated else None

    @classmethod
    def of(cls, wrapper: OptimWrapper) -> Self:
        """Return a wrapper of this class with the optimizer and the settings of another wrapper, or that one.

        Raises:
            ConfigError: the other one is not a plain `OptimWrapper`.
        """
        if isinstance(wrapper, cls):
            return wrapper
        if type(wrapper) is not OptimWrapper:
            raise ConfigError(
                f"`optim_wrapper` must be an OptimWrapper with one optimizer under {cls.engine_name}, but is of type "
                f"{type(wrapper).__name__}. For half precision give {cls.half_option}; for several optimizers use "
                "strategy 'ddp' or 'fsdp'"
            )
        return cls(wrapper.optimizer, wrapper.accumulative_counts, wrapper.clip_grad, wrapper.accumulate_across_epochs)

    def update_params(
        self, loss: Tensor, step_kwargs: Mapping[str, Any] | None = None, zero_kwargs: Mapping[str, Any] | None = None
    ) -> None:
        """Run the backward pass; at the end of a window update the parameters and clear the gradients."""
        self._updates_at_once = True
        try:
            super().update_params(loss, step_kwargs, zero_kwargs)
        finally:
            self._updates_at_once = False

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Add the gradients of a scaled loss, and count the batch.

        **Collective**: every rank, whenever gradients are sent.

        Raises:
            ConfigError: the engine would add up gradients of different parameters; or the gradients of an earlier pass
                were changed.
        """
        _ = self.engine
        self._placeholders.release()
        is_used_at_once = self._updates_at_once and self.should_sync()  # else code of the user's runs before the update
        reached = [] if is_used_at_once else self._flow.reached(loss)
        super().backward(loss, **kwargs)
        self._placeholders.hold(reached)

    def step(self, **kwargs: Any) -> None:
        """Let the engine clip the gradients, and update the parameters.

        **Collective**: every rank.

        Raises:
            ConfigError: the gradients were changed.
            DivergenceError: on every rank, if ranks have written other values into the same part of the model.
        """
        _ = self.engine
        with self._model.engine_context() if isinstance(self._model, EngineModelWrapper) else nullcontext():
            self._placeholders.release()
            self._even_out()
            if self._drift is not None:
                self._drift.before_update()
            self._masters.copy_weights()
            self._run_step(**kwargs)
            self._masters.note_weights()

    @property
    def engine(self) -> Any:
        """The engine, or its optimizer.

        Raises:
            RuntimeError: there is none yet.
        """
        if self._engine is None:
            raise RuntimeError(
                f"{type(self).__name__} must be given an engine, but has none. Give it to a Runner, or to `prepare` of "
                "the strategy, and use the one that comes back"
            )
        return self._engine

    def left_out(self, model: nn.Module) -> list[str]:
        """Return an empty list: the engine holds other tensors, and refuses parameters that it does not train."""
        return []

    def _run_step(self, **kwargs: Any) -> None:
        """Let the engine update the parameters, and read the norm of the gradients if it clips them."""
        raise NotImplementedError


def cast_inputs_and_parts(core: nn.Module, dtype: torch.dtype, which: Iterable[int | str] | None = None) -> None:
    """Convert floating-point inputs of a model to `dtype` before each forward pass, unless `dtype` is float32.

    If the model has steps of its own, so are all inputs of its parts: such steps may call parts directly.

    Args:
        core: the user's own module.
        dtype: the dtype that it computes in.
        which: the inputs of the model to convert, by position or by name; None for all.
    """
    if dtype == torch.float32:
        return
    _cast_inputs(core, dtype, which)
    if any(steps.defines_step(core, name) for name in _STEPS):
        for part in core.modules():
            own = list(part.parameters(recurse=False))
            if part is not core and own and all(parameter.dtype == dtype for parameter in own):
                _cast_inputs(part, dtype, None)


def _cast_inputs(module: nn.Module, dtype: torch.dtype, which: Iterable[int | str] | None) -> None:
    chosen = None if which is None else frozenset(which)

    def cast(key: int | str, value: Any) -> Any:
        return tree_map(to_dtype, value) if chosen is None or key in chosen else value

    def to_dtype(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return tuple(map(cast, range(len(args)), args)), {key: cast(key, value) for key, value in kwargs.items()}

    module.register_forward_pre_hook(hook, with_kwargs=True)
