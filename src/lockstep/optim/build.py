"""From a config to an `OptimWrapper`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lockstep.errors import ConfigError
from lockstep.model import unwrap_model
from lockstep.optim.wrapper import OptimWrapper
from lockstep.optim.wrapper_dict import OptimWrapperDict
from lockstep.registry import OPTIM_WRAPPERS, OPTIMIZERS


def build_optim_wrapper(model: nn.Module, cfg: OptimWrapper | Optimizer | Mapping[str, Any]) -> OptimWrapper:
    """Return the optim wrapper that `cfg` describes, over the trainable parameters of `model`.

    Args:
        model: the model as it is trained: on its device, and wrapped.
        cfg: an optim wrapper, which is returned as it is; an optimizer, which is wrapped; or a dict
            whose key `optimizer` is an optimizer or the config of one, and whose other keys are
            arguments of the wrapper (`type`, by default `OptimWrapper`); or a dict of all of these by the names of
            parts of the model, each of which gets its own.

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
    if "optimizer" not in cfg:
        raise ConfigError(
            "`optim_wrapper` must have the key 'optimizer', as in "
            f"dict(optimizer=dict(type='SGD', lr=0.1)), but has only {sorted(cfg)}"
        )
    optimizer = cfg["optimizer"]
    if isinstance(optimizer, Mapping):
        optimizer = OPTIMIZERS.build(optimizer, params=_trainable(model))
    wrapper: OptimWrapper = OPTIM_WRAPPERS.build({**cfg, "optimizer": optimizer}, type="OptimWrapper")
    return wrapper


def _is_by_part(model: nn.Module, cfg: Mapping[str, Any]) -> bool:
    children = {name for name, _ in model.named_children()}
    return "optimizer" not in cfg and bool(cfg) and cfg.keys() <= children


def _trainable(model: nn.Module) -> list[nn.Parameter]:
    params = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not params:
        raise ConfigError(
            f"the model must have parameters that require a gradient, but {type(model).__name__} "
            "has none. Unfreeze some, or call val() or test() instead of train()"
        )
    return params
