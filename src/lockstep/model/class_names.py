"""From the names of classes to the classes that a model is made of."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

from torch import nn

from lockstep.errors import did_you_mean

ClassNames: TypeAlias = str | type[nn.Module] | Iterable[str | type[nn.Module]]


def classes_in(model: nn.Module, names: ClassNames, *, what: str) -> tuple[type[nn.Module], ...]:
    """Return the classes that are meant by classes and names of classes.

    Args:
        model: where classes are looked for by name.
        names: one or several.
        what: the argument in which they were given, for errors.

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
