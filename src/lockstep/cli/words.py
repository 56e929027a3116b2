"""Command lines that Typer alone can't parse: ``key=value`` anywhere, and a script with its own options."""

from __future__ import annotations

import re
from itertools import islice
from typing import Any

from typer.core import TyperCommand

_CFG_OPTIONS = "--cfg-options"
_ASSIGNMENT = re.compile(r"[A-Za-z_][\w.\-]*=")


class CfgOptionsCommand(TyperCommand):
    """A command that takes changes to a config: ``--cfg-options a.b=1 c=[1,2]``, or just ``a.b=1`` anywhere."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Insert ``--cfg-options`` before each ``key=value`` that is not the value of another option."""
        takes_value = _options(self)
        repeated: list[str] = []
        rest = iter(args)
        before = ""
        for arg in rest:
            if before == _CFG_OPTIONS and not _ASSIGNMENT.match(arg) and not ctx.resilient_parsing:
                ctx.fail(f"{_CFG_OPTIONS} must be followed by KEY=VALUE, as in train_cfg.max_epochs=3, but by {arg!r}")
            before = arg
            if arg == "--":
                repeated += [arg, *rest]
            elif _ASSIGNMENT.match(arg):
                repeated += [_CFG_OPTIONS, arg]
            elif arg != _CFG_OPTIONS:  # the values that follow are recognised by their own form
                repeated += [arg, *islice(rest, takes_value.get(arg, False))]
        return super().parse_args(ctx, repeated)


class ScriptCommand(TyperCommand):
    """A command that runs a script: its own options may come before and after the script's name.

    All other arguments after the name belong to the script, and so does everything after ``--``.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Move the command's own options to the front, and put ``--`` before the script."""
        takes_value = _options(self)
        own: list[str] = []
        script: list[str] = []
        rest = iter(args)
        for arg in rest:
            name, equals, _ = arg.partition("=")
            if arg == "--":
                script += rest
            elif name in takes_value and (not script or name.startswith("--")):
                own.append(arg)
                if takes_value[name] and not equals:
                    value = next(rest, None)
                    if value is None:
                        return super().parse_args(ctx, own)  # reports the missing value
                    own.append(value)
            elif not script and arg.startswith("-"):
                own.append(arg)  # help, or unknown: the parser reports it
            else:
                script.append(arg)
        return super().parse_args(ctx, [*own, "--", *script])


def _options(command: TyperCommand) -> dict[str, bool]:
    """Return the names of a command's options, and whether each takes a value."""
    return {
        name: not getattr(parameter, "is_flag", False)
        for parameter in command.params
        if parameter.param_type_name == "option"
        for name in parameter.opts
    }
