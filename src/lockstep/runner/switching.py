"""What must hold for a run to go on under another strategy in the same processes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lockstep.errors import ConfigError
from lockstep.model import is_model_wrapper
from lockstep.optim import OptimWrapper, OptimWrapperDict, ParamScheduler
from lockstep.runner.arguments import RunnerArguments
from lockstep.strategy import Strategy, build_strategy


class StrategySwitch(Exception):  # noqa: N818  (no error: it leads out of the loop)
    """Ends a training loop between two iterations, because the run goes on under another strategy."""


def check_switch(args: RunnerArguments, present: Strategy, wanted: Any) -> None:
    """Check that the parts of a run can be built a second time, for another strategy.

    Args:
        args: the arguments that the run has been built from.
        present: its strategy.
        wanted: the other strategy.

    Raises:
        ConfigError: there is no such strategy, or an argument is an object that belongs to the present model.
    """
    build_strategy(wanted)
    for name in ("model", "data_preprocessor"):
        given = getattr(args, name)
        if isinstance(given, nn.Module) and (is_model_wrapper(given) or not present.leaves_module):
            function = " or a function that returns it" if name == "model" else ""
            raise ConfigError(
                f"`{name}` must be built anew to switch the strategy, but is a module that is laid out for "
                f"{type(present).__name__} already. Give its config{function}"
            )
    for name in ("optim_wrapper", "param_scheduler"):
        if (found := _built_in(getattr(args, name))) is not None:
            raise ConfigError(
                f"`{name}` must be a config to switch the strategy, but has a {type(found).__name__}, which holds the "
                "parameters of the present model. Give its config, as in dict(type=...)"
            )
    if not isinstance(args.train_cfg, Mapping | None):
        raise ConfigError(
            f"`train_cfg` must be a dict to switch the strategy, but is a {type(args.train_cfg).__name__}, which is in "
            "the midst of a training"
        )


def _built_in(given: Any) -> Any:
    """Return an object that holds parameters in a config, or None."""
    if isinstance(given, Optimizer | OptimWrapper | OptimWrapperDict | ParamScheduler):
        return given
    parts = given.values() if isinstance(given, Mapping) else given if isinstance(given, list | tuple) else ()
    return next((found for part in parts if (found := _built_in(part)) is not None), None)
