"""Support for a model's own `train_step` under an engine: what the engine must see, and what the step must not use."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lockstep.errors import ConfigError
from lockstep.groups import this_rank
from lockstep.model import steps
from lockstep.model.wrapper import all_entered
from lockstep.tree import tree_leaves, tree_map

_STEPS = ("train_step", "val_step", "test_step")
_FIRST, _EVERY = 3, 50  # forward passes in which uses of parameters and writes to them are checked
_CALL = "_compiled_call_impl"  # what `nn.Module.__call__` looks for before anything else
# Attributes that are the same for a part of a parameter and the whole, or do not depend on its values.
_HARMLESS = frozenset(
    {"device", "dtype", "requires_grad", "is_leaf", "grad", "grad_fn", "layout", "is_cuda", "is_sparse", "names"}
    | {"is_meta", "is_complex", "element_size", "shape", "size", "dim", "ndim", "numel", "is_floating_point"}
)  # fmt: skip


@dataclass(eq=False, slots=True)
class OwnStep:
    """Lets an engine train with a `train_step` that the model defines itself.

    Engines prepare for a backward pass by hooks on the outputs of the model's forward pass. A step may call parts of
    the model instead, so each loss passes through the engine before the backward pass, as if the model had returned it.

    Args:
        wrapper: the model as it is trained.
        core: the user's own module inside it.
        boosted: calls the module through the engine.
        guard: refuses functions that would take a part of a parameter for the whole; None if every rank has all
            parameters whole.
        always: pass each loss through the engine, even if the engine has seen a forward pass since the last backward
            pass.
        may_go_round: whether a direct `loss.backward()`, without the optim wrapper, works.
    """

    wrapper: nn.Module
    core: nn.Module
    boosted: Callable[[], Any]
    guard: WholeParams | None = None
    always: bool = False
    may_go_round: bool = False
    _is_shown: bool = field(default=False, init=False)

    @contextmanager
    def running(self, optim_wrapper: Any) -> Iterator[None]:
        """Return a context for one step.

        Raises:
            RuntimeError: at its end, if the optim wrapper has run no backward pass, unless `may_go_round` is set.
        """
        before, self._is_shown = optim_wrapper.inner_count, False
        methods = self._methods(optim_wrapper)
        vars(optim_wrapper).update(methods)
        try:
            with nullcontext() if self.guard is None else self.guard:
                yield
        finally:
            for name in methods:
                del vars(optim_wrapper)[name]
        if optim_wrapper.inner_count == before and not self.may_go_round:
            raise RuntimeError(
                f"`train_step` of {type(self.core).__name__} must run its backward pass by "
                "`optim_wrapper.update_params(loss)` or `optim_wrapper.backward(loss)`, but has done "
                f"neither ({this_rank()}): with this strategy `loss.backward()` and `optimizer.step()` train "
                "nothing. For a batch that is to change nothing, pass a loss times 0"
            )

    def forward(self) -> AbstractContextManager[None]:
        """Return a context in which the model is called through the engine."""
        self._is_shown |= torch.is_grad_enabled()
        return self.inside()

    def inside(self) -> AbstractContextManager[None]:
        """Return a context for the engine's own operations."""
        return nullcontext() if self.guard is None else self.guard.paused()

    def _methods(self, optim_wrapper: Any) -> dict[str, Callable[..., Any]]:
        """Return the methods that replace the optim wrapper's during a step."""
        context, backward = optim_wrapper.optim_context, optim_wrapper.backward

        def context_of(model: nn.Module) -> Any:
            return context(self.wrapper if model is self.core else model)

        def backward_of(loss: Tensor, **kwargs: Any) -> None:
            with self.inside():
                backward(self._shown(loss), **kwargs)

        def quietly(method: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                with self.inside():
                    return method(*args, **kwargs)

            return call

        others = {name: quietly(getattr(optim_wrapper, name)) for name in ("step", "zero_grad")}
        return {"optim_context": context_of, "backward": backward_of, **others}

    def _shown(self, loss: Tensor) -> Tensor:
        """Return the loss, passed through the engine unless the engine has seen the forward pass."""
        if self.always or not self._is_shown:
            attributes = vars(self.core)
            kept = {name: attributes[name] for name in (_CALL,) if name in attributes}
            attributes[_CALL] = lambda: loss
            try:
                loss = self.boosted().clone()  # the engine's hooks belong to this output only
            finally:
                del attributes[_CALL]
                attributes.update(kept)
        self._is_shown = False
        return loss


class WholeParams(TorchFunctionMode):
    """Refuses to compute with parameters that this rank holds only in part.

    Args:
        core: the module that holds the parameters.
        problem: returns what is wrong with using a parameter in a function of that name; None if nothing is.
        user: the method of the module that is checked, for messages.
        owner: what may use the parameter instead, for messages.
    """

    def __init__(
        self,
        core: nn.Module,
        problem: Callable[[Tensor, str], str | None],
        *,
        user: str = "train_step",
        owner: str = "the model's `forward`",
    ) -> None:
        super().__init__()
        self._core = core
        self._problem = problem
        self._user, self._owner = user, owner
        self._is_paused = False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Return a context in which nothing is checked."""
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Check the arguments of a torch function."""
        kwargs = kwargs or {}
        if not self._is_paused:
            self._check(func, (args, kwargs))
        return func(*args, **kwargs)

    def _check(self, func: Any, arguments: Any) -> None:
        name = getattr(func, "__name__", "")
        if name in ("__get__", "__set__"):  # of a property, which has the name
            name = getattr(getattr(func, "__self__", None), "__name__", name)
        if name in _HARMLESS:
            return
        for value in tree_leaves(arguments):
            if isinstance(value, nn.Parameter) and (problem := self._problem(value, name)) is not None:
                path = next((path for path, own in self._core.named_parameters() if own is value), "a parameter")
                raise ConfigError(
                    f"`{self._user}` of {type(self._core).__name__} must leave {path!r} to {self._owner}, "
                    f"but used it in `{name}` ({this_rank()}): {problem}"
                )


class GuardedPasses:
    """Contexts for the first forward passes and every fiftieth, which check what a pass does with parameters."""

    def __init__(self, *guards: AbstractContextManager[Any]) -> None:
        self._guards = guards
        self._passes = 0

    def next(self) -> AbstractContextManager[Any]:
        """Return the context for the next forward pass."""
        number, self._passes = self._passes, self._passes + 1
        is_due = number < _FIRST or number % _EVERY == 0
        return all_entered(self._guards) if is_due else nullcontext()


def cast_parts(core: nn.Module, dtype: torch.dtype) -> None:
    """Let the parts of a model with its own steps accept inputs of any floating-point dtype, as the model does.

    Such steps may call parts directly, bypassing the model's conversion of inputs to half precision.
    """
    if not any(steps.defines_step(core, name) for name in _STEPS):
        return
    for part in core.modules():
        own = list(part.parameters(recurse=False))
        if part is not core and own and all(parameter.dtype == dtype for parameter in own):
            cast_inputs(part, dtype)


def cast_inputs(module: nn.Module, dtype: torch.dtype, which: Iterable[int | str] | None = None) -> None:
    """Convert floating-point inputs of `module` to `dtype` before each forward pass, unless `dtype` is float32.

    Args:
        module: takes the inputs.
        dtype: the dtype that it computes in.
        which: the inputs to convert, by position or by name; None for all.
    """
    if dtype == torch.float32:
        return
    chosen = None if which is None else frozenset(which)

    def cast(key: int | str, value: Any) -> Any:
        return tree_map(to_dtype, value) if chosen is None or key in chosen else value

    def to_dtype(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return tuple(map(cast, range(len(args)), args)), {key: cast(key, value) for key, value in kwargs.items()}

    module.register_forward_pre_hook(hook, with_kwargs=True)


def called_by(package: str, *besides: str) -> bool:
    """Return whether code of a package has called torch, other than that of the modules `besides` in it."""
    frame: FrameType | None = sys._getframe(2)
    passed = ("torch", "lockstep", *besides)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if not any(name == other or name.startswith(f"{other}.") for other in passed):
            return bool(name.startswith(f"{package}."))
        frame = frame.f_back
    return False


def called_from(package: str) -> bool:
    """Return whether code of a package is on the stack between a model's own `train_step` and the caller."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_name != "train_step":
        if frame.f_globals.get("__name__", "").startswith(package):
            return True
        frame = frame.f_back
    return False
