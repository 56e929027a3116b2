"""How registries build that do not only call the constructor."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from lockstep import registry as core
from mmengine.registry.registry import build_from_cfg

__all__ = ["build_from_cfg", "build_model_from_cfg", "build_runner_from_cfg", "build_scheduler_from_cfg"]


def build_model_from_cfg(cfg: Any, registry: core.Registry, default_args: Mapping[str, Any] | None = None) -> Any:
    """Build a module from its config, or a `Sequential` from a list of configs."""
    if not isinstance(cfg, list):
        return build_from_cfg(cfg, registry, default_args)
    return import_module("mmengine.model").Sequential(*(build_from_cfg(one, registry, default_args) for one in cfg))


def build_runner_from_cfg(cfg: Mapping[str, Any], registry: core.Registry) -> Any:
    """Build the runner that a whole config describes; its `runner_type` may name another class.

    Raises:
        TypeError: `cfg` is not a dict.
        KeyError: there is no such class.
    """
    if not isinstance(cfg, Mapping):
        raise TypeError(f"`cfg` must be a dict, Config or ConfigDict, but is {cfg!r} of {type(cfg).__name__}")
    kind = registry.get(cfg.get("runner_type", "Runner"))
    if kind is None:
        raise KeyError(f"there is no runner `{cfg.get('runner_type')}`. Register it in RUNNERS")
    return kind.from_cfg(cfg)  # type: ignore[attr-defined]


def build_scheduler_from_cfg(
    cfg: Mapping[str, Any], registry: core.Registry, default_args: Mapping[str, Any] | None = None
) -> Any:
    """Build a schedule, which counts batches in place of epochs with ``convert_to_iter_based=True`` and `epoch_length`.

    Raises:
        ValueError: the schedule is to be converted, but counts batches already, or `epoch_length` is missing.
    """
    arguments = {**(default_args or {}), **cfg}
    convert, epoch_length = arguments.pop("convert_to_iter_based", False), arguments.pop("epoch_length", None)
    if not convert:
        return build_from_cfg(arguments, registry)
    if not arguments.get("by_epoch", True):
        raise ValueError("`by_epoch` must be True with `convert_to_iter_based`, but is False")
    if not epoch_length:
        raise ValueError(f"`epoch_length` must be given with `convert_to_iter_based`, but is {epoch_length!r}")
    kind: Any = arguments.pop("type")
    kind = registry[kind] if isinstance(kind, str) else kind
    optimizer = arguments.pop("optimizer")
    return kind.build_iter_from_epoch(optimizer=optimizer, **arguments, epoch_length=epoch_length)
