"""Which arguments a class or function takes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


@dataclass(frozen=True, slots=True)
class Arguments:
    """The arguments that a class or function takes by name.

    Attributes:
        named: those that its signature spells out.
        takes_others: whether it may take more: it has a `**kwargs`, or no signature to read.
    """

    named: Mapping[str, inspect.Parameter]
    takes_others: bool

    @classmethod
    def of(cls, constructor: Callable[..., Any]) -> Arguments:
        """Return the arguments of `constructor`, with those annotations evaluated that can be."""
        try:
            parameters = inspect.signature(constructor).parameters.values()
        except (TypeError, ValueError):  # some built-in types have none
            return cls({}, takes_others=True)
        code = inspect.unwrap(constructor.__init__ if inspect.isclass(constructor) else constructor)
        names = getattr(code, "__globals__", {})
        return cls(
            {parameter.name: _evaluated(parameter, names) for parameter in parameters if parameter.kind in _NAMED},
            any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters),
        )

    def unknown(self, given: Iterable[str]) -> list[str]:
        """Return those of the `given` names that cannot be taken."""
        return [] if self.takes_others else [name for name in given if name not in self.named]

    def missing(self, given: Iterable[str]) -> list[str]:
        """Return the names that must be given, but are not among the `given` ones."""
        there = set(given)
        return [
            name
            for name, parameter in self.named.items()
            if parameter.default is inspect.Parameter.empty and name not in there
        ]


def _evaluated(parameter: inspect.Parameter, names: dict[str, Any]) -> inspect.Parameter:
    if not isinstance(parameter.annotation, str):
        return parameter
    try:
        return parameter.replace(annotation=eval(parameter.annotation, names))
    except Exception:  # it means something to type checkers only
        return parameter
