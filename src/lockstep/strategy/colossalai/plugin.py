"""The options of ColossalAI's ZeRO plugin, and the checks of them and of what it is to train."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lockstep.errors import ConfigError
from lockstep.strategy.engine_parameters import check_kinds, updates_elementwise

_NAME = "lowlevel_zero"
# ColossalAI's optimizers that update each element independently, as those of torch do that are known.
_ELEMENTWISE = frozenset({"CPUAdam", "FusedAdam", "FusedSGD", "HybridAdam"})

# Options with the only value that is right here, and why.
_REFUSED = {
    "overlap_allgather": (False, "weights arrive after an update, when a save or the next step may have read them"),
    "extra_dp_size": (1, "a checkpoint could not tell which rank has which shard"),
}


def read_options(plugin: Any, more: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of ColossalAI's `LowLevelZeroPlugin`, with lockstep's defaults.

    Args:
        plugin: its name, as ColossalAI, MMEngine or lockstep spell it; or a dict with the name as `type`, and options.
        more: further options.

    Raises:
        ConfigError: another plugin is asked for, or an option that gives wrong results.
    """
    cfg = {"type": plugin} if isinstance(plugin, str) else plugin
    if not isinstance(cfg, Mapping) or not isinstance(name := cfg.get("type"), str):
        raise ConfigError(
            f"`plugin` must be the name of a plugin, or a dict with its name as `type`, but is {plugin!r}"
        )
    if name.lower().replace("-", "").replace("_", "").removesuffix("plugin") not in ("lowlevelzero", "zero"):
        raise ConfigError(
            f"`plugin` must be {_NAME!r}, but is {name!r}. What ColossalAI's other plugins do, strategies 'ddp' and "
            "'fsdp' do, also with `tensor_parallel`: docs/engines.md"
        )
    given = {key: value for key, value in cfg.items() if key != "type"}
    options = {"stage": 1, "precision": "fp32", **given, **more}
    if "max_norm" in options:
        raise ConfigError(
            "`max_norm` must be given to the optim wrapper, but is given to the plugin. Write "
            "optim_wrapper=dict(optimizer=..., clip_grad=dict(max_norm=...))"
        )
    if splits := options.keys() & {"tensor_parallel", "tp_size"}:
        raise ConfigError(f"`{splits.pop()}` must not be given to strategy 'colossalai'. Use strategy 'fsdp' with it")
    for name, (usual, why) in _REFUSED.items():
        if options.get(name, usual) != usual:
            raise ConfigError(f"`{name}` must be left out, but is {options[name]!r}: {why}. Use strategy 'fsdp'")
    if options["precision"] not in ("fp32", "bf16"):
        raise ConfigError(
            f"`precision` must be 'fp32' or 'bf16', but is {options['precision']!r}. ColossalAI's fp16 does not run on "
            "a CPU, and its loss scale is in no checkpoint: use precision='bf16', or strategy 'ddp' with an "
            "AmpOptimWrapper"
        )
    if options["stage"] not in (1, 2):
        raise ConfigError(
            f"`stage` must be 1 or 2, but is {options['stage']!r}. To shard the parameters, too, use strategy='fsdp'"
        )
    return options


def check_run(model: nn.Module, optimizer: Optimizer, dtype: torch.dtype) -> None:
    """Refuse models and optimizers that the plugin does not support, before anything is changed.

    Args:
        model: the model.
        optimizer: over its parameters.
        dtype: in which the model is to compute.

    Raises:
        ConfigError: the model or the optimizer does not fit.
    """
    kind = type(optimizer)
    is_colossalais = kind.__module__.startswith("colossalai.") and kind.__name__ in _ELEMENTWISE
    if not (is_colossalais or updates_elementwise(optimizer)):
        raise ConfigError(
            f"`optimizer` must update each number by itself, because {_NAME!r} hands it shards, but is "
            f"{kind.__name__}, which is not known to do so. Use AdamW or SGD, strategy 'ddp' or 'fsdp', "
            "or set `is_elementwise = True` on its class if it does"
        )
    is_half = dtype != torch.float32
    check_kinds(model, half=is_half, engine=f"ColossalAI's {_NAME!r}", half_option="precision='bf16'")
