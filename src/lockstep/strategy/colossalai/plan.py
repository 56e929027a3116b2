"""From a tensor-parallel plan to ColossalAI's layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from lockstep.errors import ConfigError
from lockstep.model.tensor_parallel_plan import read_plan


class Replacement(NamedTuple):
    """What takes the place of a linear layer.

    Attributes:
        layer: name of a class in `colossalai.shardformer.layer`.
        options: its options.
    """

    layer: str
    options: dict[str, Any]


def replacements(model: nn.Module, plan: Mapping[str, Any] | None, tp_size: int) -> dict[str, Replacement]:
    """Return what a plan makes of the layers of a model, by their names.

    Args:
        model: whose layers are meant.
        plan: see `lockstep.model.tensor_parallel_plan.read_plan`; None is the model's own `_tp_plan`.
        tp_size: number of ranks that share a replica.

    Raises:
        ConfigError: the plan does not fit the model, or has a style that ColossalAI has no layer for.
    """
    found: dict[str, Replacement] = {}
    for name, style in read_plan(model, plan).items():
        layer = model.get_submodule(name)
        if not isinstance(layer, nn.Linear) or not isinstance(style, ColwiseParallel | RowwiseParallel):
            raise ConfigError(
                f"`tensor_parallel` must split linear layers 'colwise' or 'rowwise' under the strategy 'colossalai', "
                f"but `{name}` is a {type(layer).__name__} with {type(style).__name__}. Leave it out, give the plugin "
                "a `custom_policy`, or use strategy='fsdp'"
            )
        by_column = isinstance(style, ColwiseParallel)
        size = layer.out_features if by_column else layer.in_features
        if size % tp_size:
            raise ConfigError(
                f"`{name}.{'out' if by_column else 'in'}_features` must be a multiple of {tp_size}, the degree of "
                f"tensor_parallel, but is {size}. Leave it out of the plan, or choose another degree"
            )
        if by_column:
            found[name] = Replacement("Linear1D_Col", {"gather_output": _is_replicated(style.output_layouts)})
        else:
            found[name] = Replacement("Linear1D_Row", {"parallel_input": not _is_replicated(style.input_layouts)})
    return found


def _is_replicated(layouts: Any) -> bool:
    return all(layout.is_replicate() for layout in layouts)
