"""Where the parameters of a model are, by the names that its author knows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from lockstep.model import is_model_wrapper

# Modules that torch puts around another one keep it under these names: torch.compile, activation checkpointing.
_AROUND = ("_orig_mod", "_checkpoint_wrapped_module")


@dataclass(frozen=True, slots=True)
class ParamSite:
    """One place of one parameter.

    Attributes:
        name: its full name in the user's own module, without the prefixes of wrappers.
        parameter: the parameter, as it is trained.
        module: the module that holds it.
        parent: the class name of the module around that one; empty at the top.
    """

    name: str
    parameter: nn.Parameter
    module: nn.Module
    parent: str

    @property
    def own_name(self) -> str:
        """The last part of the name, such as `weight`."""
        return self.name.rpartition(".")[2]


def param_sites(model: nn.Module) -> list[ParamSite]:
    """Return the places of all parameters, in the order of `model.parameters()`.

    A parameter that is shared has several. Wrappers around the model, or around parts of it, are looked through.
    """
    return list(_sites(model, "", ""))


def _sites(module: nn.Module, prefix: str, parent: str) -> Iterator[ParamSite]:
    module = _inside(module)
    for name, parameter in module._parameters.items():
        if parameter is not None:
            yield ParamSite(prefix + name, parameter, module, parent)
    for name, child in module._modules.items():
        if child is not None:
            yield from _sites(child, f"{prefix}{name}.", type(module).__name__)


def _inside(module: nn.Module) -> nn.Module:
    while True:
        names = ("module",) if is_model_wrapper(module) else _AROUND
        inner = next((module._modules[name] for name in names if name in module._modules), None)
        if inner is None:
            return module
        module = inner
