"""From a config to an `OptimWrapper`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lockstep.model import unwrap_model
from lockstep.optim.wrapper import OptimWrapper
from lockstep.optim.wrapper_dict import OptimWrapperDict
from lockstep.registry import OPTIM_WRAPPER_CONSTRUCTORS


def build_optim_wrapper(model: nn.Module, cfg: OptimWrapper | Optimizer | Mapping[str, Any]) -> OptimWrapper:
    """Return the optim wrapper that `cfg` describes, over the parameters of `model`.

    Args:
        model: the model as it is trained: on its device, and wrapped.
        cfg: an optim wrapper, which is returned as it is; an optimizer, which is wrapped; or a dict whose key
            `optimizer` is an optimizer or the config of one, and whose other keys are arguments of the wrapper (`type`,
            by default `OptimWrapper`), `paramwise_cfg` with options of some parameters (see
            `DefaultOptimWrapperConstructor`), and `constructor`, the name or class of another constructor; or a dict of
            all of these by the names of parts of the model, each of which gets its own.

    Raises:
        ConfigError: `optimizer` is missing, or the model has nothing to train.

    Example:
        >>> wrapper = build_optim_wrapper(
        ...     nn.Linear(2, 1), dict(optimizer=dict(type="SGD", lr=0.1), accumulative_counts=4)
        ... )
    """
    if isinstance(cfg, OptimWrapper):
        return cfg
    if isinstance(cfg, Optimizer):
        return OptimWrapper(cfg)
    if not isinstance(cfg, Mapping):
        raise TypeError(
            "`optim_wrapper` must be an OptimWrapper, an optimizer or a config dict, but is "
            f"{cfg!r} of type {type(cfg).__name__}"
        )
    if _is_by_part(unwrap_model(model), cfg):
        parts = {name: unwrap_model(model).get_submodule(name) for name in cfg}
        return OptimWrapperDict(**{name: build_optim_wrapper(part, cfg[name]) for name, part in parts.items()})
    arguments = dict(cfg)
    kind = arguments.pop("constructor", None) or "DefaultOptimWrapperConstructor"
    constructor = OPTIM_WRAPPER_CONSTRUCTORS.build(
        {"type": kind, "optim_wrapper_cfg": arguments, "paramwise_cfg": arguments.pop("paramwise_cfg", None)}
    )
    wrapper = constructor(model)
    if not isinstance(wrapper, OptimWrapper):
        raise TypeError(f"the constructor {kind!r} must return an OptimWrapper, but returned {wrapper!r}")
    return wrapper


def _is_by_part(model: nn.Module, cfg: Mapping[str, Any]) -> bool:
    children = {name for name, _ in model.named_children()}
    return not cfg.keys() & {"optimizer", "constructor"} and bool(cfg) and cfg.keys() <= children
