"""The arguments that a class or function takes, and calling it with the arguments of a config."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from lockstep.errors import ConfigError, did_you_mean, message_of

_UNEXPECTED = re.compile(r"unexpected keyword argument '(\w+)'")
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


@dataclass(frozen=True, slots=True)
class Arguments:
    """The arguments that a class or function takes by name.

    Attributes:
        named: the arguments that its signature names.
        takes_others: whether it may take more: it has `**kwargs`, or no signature that can be read.
    """

    named: Mapping[str, inspect.Parameter]
    takes_others: bool

    @classmethod
    def of(cls, constructor: Callable[..., Any]) -> Arguments:
        """Return the arguments of `constructor`; string annotations are evaluated if possible."""
        try:
            parameters = inspect.signature(constructor).parameters.values()
        except (TypeError, ValueError):  # Some built-in types have no signature.
            return cls({}, takes_others=True)
        code = inspect.unwrap(constructor.__init__ if inspect.isclass(constructor) else constructor)
        names = getattr(code, "__globals__", {})
        return cls(
            {parameter.name: _evaluated(parameter, names) for parameter in parameters if parameter.kind in _NAMED},
            any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters),
        )

    def unknown(self, given: Iterable[str]) -> list[str]:
        """Return the `given` names that are not accepted."""
        return [] if self.takes_others else [name for name in given if name not in self.named]

    def missing(self, given: Collection[str]) -> list[str]:
        """Return the required names that are not in `given`."""
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
    except Exception:  # The annotation names something that exists for type checkers only.
        return parameter


class BuildError(ConfigError, TypeError):
    """A config gives an unknown argument, or lacks a required one."""


def construct(constructor: Callable[..., Any], arguments: Mapping[str, Any], kind: str) -> Any:
    """Call `constructor` with `arguments`; errors use `kind` to name what was being built.

    Arguments are first checked against the signature, so that a misspelt key is not reported as an error in the
    constructor's own code. Errors in that code are raised unchanged, with a note on what was being built.

    Raises:
        BuildError: an argument is unknown or missing.
    """
    title = check_names(constructor, arguments, kind)
    try:
        return constructor(**arguments)
    except Exception as error:
        # With **kwargs the signature does not name the key; the error of the class that rejects the key does.
        refused = _UNEXPECTED.search(message_of(error))
        if refused and refused[1] in arguments and isinstance(error, TypeError) and not isinstance(error, BuildError):
            key = refused[1]
            hint = did_you_mean(key, _accepted(constructor) - {key})
            raise BuildError(f"{title}: unknown argument `{key}`{hint}") from error
        error.add_note(f"while building the {title} with {', '.join(arguments) or 'no arguments'}")
        raise


def check_names(
    constructor: Callable[..., Any], arguments: Collection[str], kind: str, also: Iterable[str] = ()
) -> str:
    """Check the names of the arguments for a constructor, and return what is built, in words.

    Args:
        constructor: what is to be called.
        arguments: the names.
        kind: what is built.
        also: names that the caller takes itself, for the suggestions.

    Raises:
        BuildError: an argument is unknown or missing.
    """
    title = f"{kind} `{getattr(constructor, '__qualname__', None) or repr(constructor)}`"
    takes = Arguments.of(constructor)
    known = {*takes.named, *also}
    faults = [f"unknown argument `{key}`{did_you_mean(key, known)}" for key in takes.unknown(arguments)]
    if missing := [f"`{name}`" for name in takes.missing(arguments)]:
        faults.append(f"missing argument{'s'[: len(missing) > 1]} {', '.join(missing)}")
    if faults:
        raise BuildError(f"{title}: {'; '.join(faults)}")
    return title


def _accepted(constructor: Callable[..., Any]) -> set[str]:
    """Return every argument name in the signatures of a function, or of a class and its bases."""
    owners = inspect.getmro(constructor) if inspect.isclass(constructor) else (constructor,)
    return set().union(*(Arguments.of(owner).named for owner in owners))
