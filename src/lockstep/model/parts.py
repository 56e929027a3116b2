"""The parts of a model: classes by name, the owners of parameters, and the modules that can be called."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeAlias

from torch import nn

from lockstep.errors import did_you_mean

INSIDE_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")
"""The names under which torch's wrappers keep a module, and so in those of its tensors: `torch.compile`, checkpointing.

They give out the module in no other way (2.13).
"""
ClassNames: TypeAlias = str | type[nn.Module] | Iterable[str | type[nn.Module]]


def classes_in(model: nn.Module, names: ClassNames, *, what: str) -> tuple[type[nn.Module], ...]:
    """Return the module classes given by `names`, which holds classes and names of classes.

    Args:
        model: the model in which classes are looked up by name.
        names: one or several.
        what: the name of the argument that gave them, for errors.

    Raises:
        TypeError: something in `names` is neither a name nor a class of modules.
        ValueError: the model has no module of that class.
    """
    kinds = {type(module) for module in model.modules()}
    items = [names] if isinstance(names, str | type) or not isinstance(names, Iterable) else list(names)
    found: set[type[nn.Module]] = set()
    for item in items:
        if isinstance(item, str):
            named = {kind for kind in kinds if kind.__name__ == item}
            if not named:
                raise ValueError(
                    f"`{what}` must name classes of modules in {type(model).__name__}, but names {item!r}"
                    + did_you_mean(item, {kind.__name__ for kind in kinds})
                )
            found |= named
        elif isinstance(item, type) and issubclass(item, nn.Module):
            found.add(item)
        else:
            raise TypeError(f"`{what}` must hold classes of modules or their names, but holds {item!r}")
    return tuple(found)


def owners_of_parameters(model: nn.Module) -> dict[nn.Parameter, list[tuple[nn.Module, str]]]:
    """Return, for each parameter, the modules that own it, and its name in each of them."""
    owners: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            owners.setdefault(parameter, []).append((module, name))
    return owners


def is_callable(module: nn.Module) -> bool:
    """Return whether a module has a `forward`; containers such as `ModuleList` do not."""
    return type(module).forward is not nn.Module.forward


def callable_children(module: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    """Yield the callable children, including those in containers: each one's parent, its name there, and the child."""
    for name, child in list(module.named_children()):
        if is_callable(child):
            yield module, name, child
        else:
            yield from callable_children(child)
