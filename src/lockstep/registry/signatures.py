"""Which arguments a class or function takes, and a call with those that a config gives."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from lockstep.errors import ConfigError, did_you_mean

_UNEXPECTED = re.compile(r"unexpected keyword argument '(\w+)'")
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

    def missing(self, given: Collection[str]) -> list[str]:
        """Return the names that must be given, but are not among the `given` ones."""
        return [
            name
            for name, parameter in self.named.items()
            if parameter.default is inspect.Parameter.empty and name not in given
        ]


def _evaluated(parameter: inspect.Parameter, names: dict[str, Any]) -> inspect.Parameter:
    if not isinstance(parameter.annotation, str):
        return parameter
    try:
        return parameter.replace(annotation=eval(parameter.annotation, names))
    except Exception:  # it means something to type checkers only
        return parameter


class BuildError(ConfigError, TypeError):
    """The arguments in a config do not fit what they are given to."""


def construct(constructor: Callable[..., Any], arguments: Mapping[str, Any], kind: str) -> Any:
    """Call `constructor` with `arguments`; `kind` says in errors what was being built.

    Arguments are checked against the signature first, so that a misspelt key is not taken for an error in the
    constructor's own code. The latter goes through unchanged, with a note on what was being built.

    Raises:
        BuildError: an argument is unknown or missing.
    """
    title = f"{kind} `{getattr(constructor, '__qualname__', None) or repr(constructor)}`"
    _check_names(constructor, arguments, title)
    try:
        return constructor(**arguments)
    except Exception as error:
        # Behind a **kwargs the signature does not say; the class that refuses the key does.
        refused = _UNEXPECTED.search(str(error))
        if refused and refused[1] in arguments and isinstance(error, TypeError) and not isinstance(error, BuildError):
            key = refused[1]
            hint = did_you_mean(key, _accepted(constructor) - {key})
            raise BuildError(f"{title}: unknown argument `{key}`{hint}") from error
        error.add_note(f"while building the {title} with {', '.join(arguments) or 'no arguments'}")
        raise


def _check_names(constructor: Callable[..., Any], arguments: Mapping[str, Any], title: str) -> None:
    takes = Arguments.of(constructor)
    faults = [f"unknown argument `{key}`{did_you_mean(key, takes.named)}" for key in takes.unknown(arguments)]
    if missing := [f"`{name}`" for name in takes.missing(arguments)]:
        faults.append(f"missing argument{'s'[: len(missing) > 1]} {', '.join(missing)}")
    if faults:
        raise BuildError(f"{title}: {'; '.join(faults)}")


def _accepted(constructor: Callable[..., Any]) -> set[str]:
    """Return every argument name that the class or one of its bases spells out."""
    owners = inspect.getmro(constructor) if inspect.isclass(constructor) else (constructor,)
    return set().union(*(Arguments.of(owner).named for owner in owners))
