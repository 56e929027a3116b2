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
    """The arguments that a class or function takes by name; parameters that are positional only are left out.

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
        function = inspect.unwrap(constructor.__init__ if inspect.isclass(constructor) else constructor)
        module_globals = getattr(function, "__globals__", {})
        # One annotation at a time, since `signature(eval_str=True)` fails for all if one can't be evaluated.
        return cls(
            {one.name: _evaluated(one, module_globals) for one in parameters if one.kind in _NAMED},
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


def _evaluated(parameter: inspect.Parameter, module_globals: dict[str, Any]) -> inspect.Parameter:
    if not isinstance(parameter.annotation, str):
        return parameter
    try:
        return parameter.replace(annotation=eval(parameter.annotation, module_globals))
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
    check_names(constructor, arguments, kind)
    subject = _subject(constructor, kind)
    try:
        return constructor(**arguments)
    except Exception as error:
        # A constructor with **kwargs passes unknown keys on. The class that rejects one names it in its TypeError.
        refused = _UNEXPECTED.search(message_of(error)) if isinstance(error, TypeError) else None
        key = refused[1] if refused and not isinstance(error, BuildError) else ""
        if key in arguments and key not in Arguments.of(constructor).named:
            known = accepted(constructor) - {key}  # a base class may accept a key that its subclass refuses
            hint = did_you_mean(key, known) if known else ""  # of `**kwargs` alone nothing is known
            raise BuildError(f"{subject}: unknown argument `{key}`{hint}") from error
        error.add_note(f"while building the {subject} with {', '.join(map(str, arguments)) or 'no arguments'}")
        raise


def check_names(
    constructor: Callable[..., Any], arguments: Collection[str], kind: str, also: Iterable[str] = ()
) -> None:
    """Check the names of the arguments for a constructor.

    Args:
        constructor: the class or function to be called.
        arguments: the names.
        kind: the noun for messages, such as "hook".
        also: further names that a suggestion may offer, because the caller handles them itself.

    Raises:
        BuildError: an argument is unknown or missing.
    """
    takes = Arguments.of(constructor)
    known = {*takes.named, *also}
    faults = [f"unknown argument `{key}`{did_you_mean(key, known)}" for key in takes.unknown(arguments)]
    if missing := [f"`{name}`" for name in takes.missing(arguments)]:
        faults.append(f"missing {'argument' if len(missing) == 1 else 'arguments'} {', '.join(missing)}")
    if faults:
        raise BuildError(f"{_subject(constructor, kind)}: {'; '.join(faults)}")


def _subject(constructor: Callable[..., Any], kind: str) -> str:
    """Return the phrase for messages, such as ``hook `EMAHook` ``."""
    return f"{kind} `{getattr(constructor, '__qualname__', None) or repr(constructor)}`"


def accepted(constructor: Callable[..., Any]) -> set[str]:
    """Return every argument name in the signatures of a function, or of a class and its bases."""
    owners = constructor.__mro__ if inspect.isclass(constructor) else (constructor,)
    return set().union(*(Arguments.of(owner).named for owner in owners))
