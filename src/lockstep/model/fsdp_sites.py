"""Where the parameters of a sharded model are: FSDP puts shards and gathered parameters in the same places, in turn."""

from __future__ import annotations

from typing import TypeAlias

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

Site: TypeAlias = tuple[nn.Module, str]
"""The module that owns a parameter, and the parameter's name in it."""


def is_unit(module: nn.Module) -> bool:
    """Return whether FSDP gathers a module as a unit."""
    return isinstance(module, FSDPModule)


def parameter_at(site: Site) -> nn.Parameter:
    """Return what is there now: the shard, or the gathered parameter."""
    owner, name = site
    return owner.get_parameter(name)


def sites_by_unit(module: nn.Module) -> dict[nn.Module, dict[Site, str]]:
    """Return, for each unit, where to find its sharded parameters, and their names as seen from `module`."""
    sites: dict[nn.Module, dict[Site, str]] = {}
    unit_of: dict[str, nn.Module] = {}
    names: dict[Tensor, str] = {}
    for name, part in module.named_modules():
        unit = part if is_unit(part) else unit_of[name.rpartition(".")[0]]
        unit_of[name] = unit
        own = sites.setdefault(unit, {})
        for key, parameter in part.named_parameters(recurse=False):
            if hasattr(parameter, "device_mesh"):
                full_name = names.setdefault(parameter, f"{name}.{key}" if name else key)
                own[part, key] = full_name
    return sites
