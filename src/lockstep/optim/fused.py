"""Which optimizers update all parameters in one kernel; see docs/decisions/0007-fused-optimizers.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

# Torch's optimizers with a fused kernel for accelerators, and whether it takes DTensors, too (2.13).
_TAKES_SHARDS: Mapping[type, bool] = {Adam: True, AdamW: True, SGD: False}
# On the CPU a fused update rounds otherwise than a plain loop's.
_DEVICES = ("cuda", "mps", "xpu")
# What the user may have said of the implementation; a fused one rules out the others.
_CHOICES = ("fused", "foreach", "differentiable")
_IMPLEMENTATION = (*_CHOICES, "capturable")


def fits_fused(kind: Any, options: Mapping[str, Any], params: Sequence[nn.Parameter], model: nn.Module) -> bool:
    """Return whether an optimizer of these parameters is to be fused where its config does not say so.

    Args:
        kind: the optimizer's class.
        options: its other arguments.
        params: all that it will update.
        model: whose they are.
    """
    if kind not in _TAKES_SHARDS or any(options.get(name) is not None for name in _CHOICES):
        return False
    meshes = {getattr(param, "device_mesh", None) for param in params}
    if meshes != {None} and not (len(meshes) == 1 and _TAKES_SHARDS[kind]):
        return False
    if any(getattr(module, "sparse", False) for module in model.modules()):  # an embedding's gradients
        return False
    return all(torch.is_floating_point(param) and param.device.type in _DEVICES for param in params)


def keep_implementation(optimizer: Optimizer) -> None:
    """Let an optimizer stay fused or not when it loads the state of one that was not or was.

    A checkpoint may come from another kind of device, or from parameters that were not sharded.
    """
    optimizer.register_load_state_dict_pre_hook(_with_own_implementation)


def _with_own_implementation(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    groups = [
        {**saved, **{name: own[name] for name in _IMPLEMENTATION if name in own}}
        for saved, own in zip(state["param_groups"], optimizer.param_groups, strict=False)
    ]
    # Where their number differs, torch says so.
    return {**state, "param_groups": groups if len(groups) == len(state["param_groups"]) else state["param_groups"]}
