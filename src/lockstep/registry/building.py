"""Calling a constructor with arguments from a config, and saying clearly what does not fit."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

from lockstep.errors import ConfigError, did_you_mean
from lockstep.registry.signatures import Arguments

_UNEXPECTED = re.compile(r"unexpected keyword argument '(\w+)'")


class BuildError(ConfigError, TypeError):
    """The arguments in a config do not fit what they are given to."""


def construct(constructor: Callable[..., Any], arguments: Mapping[str, Any], kind: str) -> Any:
    """Call `constructor` with `arguments`; `kind` says in errors what was being built.

    Arguments are checked against the signature first, so that a misspelt key is not taken for an error in the
    constructor's own code. The latter goes through unchanged, with a note on what was being built.

    Raises:
        BuildError: an argument is unknown or missing.
    """
    title = f"{kind} `{_title(constructor)}`"
    _check_names(constructor, arguments, title)
    try:
        return constructor(**arguments)
    except TypeError as error:
        # Behind a **kwargs the signature does not say; the class that refuses the key does.
        refused = _UNEXPECTED.search(str(error))
        if refused and refused[1] in arguments and not isinstance(error, BuildError):
            key = refused[1]
            hint = did_you_mean(key, _accepted(constructor) - {key})
            raise BuildError(f"{title}: unknown argument `{key}`{hint}") from error
        error.add_note(_note(title, arguments))
        raise
    except Exception as error:
        error.add_note(_note(title, arguments))
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


def _title(constructor: Callable[..., Any]) -> str:
    return getattr(constructor, "__qualname__", None) or repr(constructor)


def _note(title: str, arguments: Mapping[str, Any]) -> str:
    return f"while building the {title} with {', '.join(arguments) or 'no arguments'}"
