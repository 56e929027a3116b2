"""What every `Runner` is made from: one object of all arguments, and the attributes of the run that it builds."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec

from lockstep.runner.arguments import RunnerArguments, unknown_argument
from lockstep.runner.run import TrainRun

P = ParamSpec("P")
_BEFORE_A_RUN = {
    **dict.fromkeys(("epoch", "iter", "max_iters"), 0),
    **dict.fromkeys(("max_epochs", "val_loop", "test_loop", "last_evaluation"), None),
}


def taking(
    arguments: Callable[P, RunnerArguments],
) -> Callable[[Callable[[Any, RunnerArguments], None]], Callable[Concatenate[Any, P], None]]:
    """Let a method that takes all arguments as one object be called with separate arguments."""

    def decorate(method: Callable[[Any, RunnerArguments], None]) -> Callable[Concatenate[Any, P], None]:
        @wraps(RunnerArguments.__init__)
        def init(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> None:
            if (unknown := unknown_argument(kwargs)) is not None:
                raise unknown
            try:
                given = arguments(*args, **kwargs)
            except TypeError as error:  # Python names the class of the arguments
                raise TypeError(str(error).replace("RunnerArguments.__init__()", "Runner()")) from None
            method(self, given)

        return init

    return decorate


if TYPE_CHECKING:
    PartsOfRun = TrainRun
else:

    class PartsOfRun:
        """The attributes that a Runner takes from its run; before there is one, their initial values."""

        def __getattr__(self, name: str) -> Any:
            if not (hasattr(TrainRun, name) or name in TrainRun.__dataclass_fields__):
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            built = self._run or self._workspace
            if hasattr(built, name):
                return getattr(built, name)
            if name in _BEFORE_A_RUN:
                return _BEFORE_A_RUN[name]
            raise not_built(name)


def not_built(name: str) -> AttributeError:
    """Return the error for an attribute of a run where there is none yet."""
    return AttributeError(f"`{name}` is built by train(), val() or test(), and none of them has built it yet")
