"""Refuses code that would take a part of a parameter, which is all that a rank holds of it, for the whole."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lockstep.errors import ConfigError
from lockstep.groups import this_rank
from lockstep.tree import tree_leaves

# Attributes that are the same for a part of a parameter and the whole, or do not depend on its values.
_HARMLESS = frozenset(
    {"device", "dtype", "requires_grad", "is_leaf", "grad", "grad_fn", "layout", "is_cuda", "is_sparse", "names"}
    | {"is_meta", "is_complex", "element_size", "shape", "size", "dim", "ndim", "numel", "is_floating_point"}
)  # fmt: skip


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


def called_by_deepspeed(but: str = "torch") -> bool:
    """Return whether DeepSpeed has called torch, other than by its module `but`."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        name = f"{frame.f_globals.get('__name__', '')}."
        if not name.startswith(("torch.", "lockstep.", f"{but}.")):
            return name.startswith("deepspeed.")
        frame = frame.f_back
    return False
