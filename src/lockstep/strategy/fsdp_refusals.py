"""What torch's optimizers can't do, or do wrong, with parameters that are sharded."""

from __future__ import annotations

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import LBFGS, SGD, Adafactor, Muon, Optimizer, Rprop

from lockstep.errors import ConfigError

_OTHERWISE = "or strategy 'ddp', which keeps every parameter whole"


def check_optimizer(optimizer: Optimizer, model: nn.Module) -> None:
    """Refuse an optimizer that would fail or go wrong in its first step.

    Args:
        optimizer: holds the sharded parameters.
        model: whose they are, for their names.

    Raises:
        ConfigError: on every rank, naming a parameter, if the optimizer is Adafactor, LBFGS or Rprop; if Muon would
            update a matrix with fewer rows than shards; if another one than SGD would update a complex parameter whose
            shards differ in size; or if it is to be fused, or to work on lists, where some parameters are not sharded.

    **Source**: found by comparing all optimizers of torch 2.13 with one process. Those over complex numbers take real
    views of the shards in place, which of uneven DTensors are copies; Adafactor takes norms of its own shard alone.
    """
    kind = type(optimizer).__name__
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    for group in optimizer.param_groups:
        params = [parameter for parameter in group["params"] if parameter.requires_grad]
        for parameter in params:
            reason = _reason(optimizer, parameter)
            if reason is not None:
                raise ConfigError(
                    f"`optimizer` must be one that can update `{names[parameter]}` in shards, but is {kind}, which "
                    f"{reason}, {_OTHERWISE}"
                )
        sharded = [parameter for parameter in params if isinstance(parameter, DTensor)]
        whole = [parameter for parameter in params if not isinstance(parameter, DTensor)]
        for option in ("fused", "foreach"):
            if group.get(option) and sharded and whole:
                raise ConfigError(
                    f"`{option}` of {kind} must not be True where parameters that are sharded, like "
                    f"`{names[sharded[0]]}`, and others that are whole, like `{names[whole[0]]}`, are updated together "
                    "under FSDP. Leave it out, or use strategy 'ddp'"
                )


def _reason(optimizer: Optimizer, parameter: Tensor) -> str | None:
    """Return why an optimizer must not update a parameter, and what to use instead; None where it may."""
    if not isinstance(parameter, DTensor):
        return None
    if isinstance(optimizer, LBFGS):
        return "works on all parameters in one vector. Use AdamW or SGD"
    if isinstance(optimizer, Adafactor):
        return "takes norms over whole parameters. Use AdamW"
    if isinstance(optimizer, Rprop):
        return "writes to single elements. Use AdamW or SGD"
    if isinstance(optimizer, Muon) and parameter.shape[0] < _shards(parameter, 0):
        return (
            f"fails where there are more shards, {_shards(parameter, 0)}, than rows, {parameter.shape[0]}. Shard over "
            "fewer ranks with device_mesh=(replicas, shards)"
        )
    if parameter.is_complex() and not isinstance(optimizer, SGD):
        uneven = [dim for dim, size in enumerate(parameter.shape) if size % _shards(parameter, dim)]
        if uneven:
            return (
                f"goes wrong on complex numbers in uneven shards: dim {uneven[0]} has {parameter.shape[uneven[0]]} "
                f"elements for {_shards(parameter, uneven[0])} ranks. Use SGD, a number of ranks that divides it"
            )
    return None


def _shards(parameter: DTensor, dim: int) -> int:
    """Return in how many shards a dim is divided, over all axes of the mesh."""
    shards = 1
    for axis, placement in enumerate(parameter.placements):
        if placement.is_shard(dim):
            shards *= parameter.device_mesh.size(axis)
    return shards
