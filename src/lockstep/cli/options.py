"""What several commands share: options, as fields of dataclasses; command lines that Typer can't parse; errors.

A command with many options is a dataclass, see `command`.
"""

from __future__ import annotations

import inspect
import os
import re
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer
from typer.core import TyperCommand

from lockstep.errors import message_of
from lockstep.launch import NUMA_MODES, JobSpec
from lockstep.launch.notices import say
from lockstep.masking import mask_text, printable
from lockstep.topology import topology_if_known

_CFG_OPTIONS = "--cfg-options"
_ASSIGNMENT = re.compile(r"[A-Za-z_][\w.\-]*=")
_SECONDS_FOR_RANK_0 = 3.0


class Count(int):
    """A number of ranks or nodes; of a range MIN:MAX, its end.

    Attributes:
        least: MIN; None without a range.
    """

    least: int | None = None


def _count(value: str | int) -> Count:
    first, colon, last = str(value).partition(":")  # a default is a number
    try:
        least, most = int(first), int(last if colon else first)
    except ValueError:
        least, most = 0, 0
    if not 1 <= least <= most:
        raise typer.BadParameter(f"must be a whole number, 1 or more, or a range MIN:MAX of them, but is {value}")
    count = Count(most)
    count.least = least if colon else None
    return count


rank_option = partial(typer.Option, rich_help_panel="Ranks")

ConfigPath = Annotated[Path, typer.Argument(metavar="CONFIG", help="A Python, YAML or JSON file.")]
CfgOptions = Annotated[
    list[str] | None,
    typer.Option(
        _CFG_OPTIONS,
        metavar="KEY=VALUE ...",
        help="Change the config: a.b=1 c.0=[1,2]. The name of this option may be left out.",
    ),
]
TrustConfig = Annotated[
    bool,
    typer.Option(
        "--trust-config",
        help="Let a YAML or JSON config name import paths, custom_imports and Python bases, which run code.",
    ),
]


@dataclass(frozen=True, kw_only=True)
class RankOptions:
    """Options for the number of ranks and machines."""

    nproc: Annotated[
        int | None,
        rank_option(
            parser=_count,
            metavar="N",
            help="Ranks on this machine. Default: 1. MIN:MAX: as many as are left start again, see --max-restarts.",
        ),
    ] = None
    nnodes: Annotated[
        int,
        rank_option(
            parser=_count,
            metavar="N",
            help="Machines of the job; call this on each. MIN:MAX: it goes on without machines that are lost.",
        ),
    ] = 1
    node_rank: Annotated[int, rank_option(min=0, metavar="N", help="Which of the machines this is.")] = 0
    rdzv: Annotated[
        str | None,
        rank_option(
            metavar="HOST:PORT", help="Where several machines meet: an address of node 0, and a free port there."
        ),
    ] = None

    def job_spec(self) -> JobSpec:
        """Return the job that the options describe, or exit with a usage error."""
        least, least_nodes = getattr(self.nproc, "least", None), getattr(self.nnodes, "least", None)
        for name, what, low, high in (
            ("--nproc", "ranks", least, self.nproc),
            ("--nnodes", "nodes", least_nodes, self.nnodes),
        ):
            if low is not None and not getattr(self, "max_restarts", 0):
                raise typer.BadParameter(
                    f"`{name}` {low}:{high} must come with --max-restarts: how often the {what} that are left "
                    f"start again. Give both, or one number of {what}"
                )
        try:
            job = JobSpec(self.nproc or 1, self.nnodes, self.node_rank, self.rdzv, least, least_nodes)
            return replace(job, rdzv_timeout_seconds=getattr(self, "rdzv_timeout", job.rdzv_timeout_seconds))
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None

    def of_launch(self) -> dict[str, Any]:
        """Return those options of the command that are arguments of `launch`."""
        names = ("max_restarts", "grace_seconds", "numa")
        return {name: getattr(self, name) for name in names if hasattr(self, name)}


@dataclass(frozen=True, kw_only=True)
class LaunchOptions(RankOptions):
    """Options for the ranks of jobs that may take long, which `train` and `launch` have."""

    max_restarts: Annotated[
        int, rank_option(min=0, metavar="N", help="How often all ranks start again after one failed.")
    ] = 0
    grace_seconds: Annotated[
        int, rank_option(min=0, metavar="SECONDS", help="How long ranks may take to save and end after a signal.")
    ] = 60
    rdzv_timeout: Annotated[
        float, rank_option(min=1, metavar="SECONDS", help="How long to wait for the other machines.")
    ] = 900.0
    numa: Annotated[
        str | None,
        rank_option(metavar="|".join(NUMA_MODES), help="Bind each rank to CPUs near its GPU, as torchrun does."),
    ] = None


def command(options: type[Any]) -> Callable[..., None]:
    """Return a function that Typer can use as a command: it has one parameter for each field of a dataclass.

    The function makes the dataclass of what the user has typed, and calls its method `run`.
    """

    def run(**values: Any) -> None:
        options(**values).run()

    hints = get_type_hints(options, include_extras=True)
    parameters = inspect.signature(options).parameters.values()
    run.__doc__ = options.__doc__
    run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [parameter.replace(annotation=hints[parameter.name]) for parameter in parameters]
    )
    return run


class CfgOptionsCommand(TyperCommand):
    """A command that takes changes to a config: ``--cfg-options a.b=1 c=[1,2]``, or just ``a.b=1`` anywhere."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Insert ``--cfg-options`` before each ``key=value`` that is not the value of another option."""
        takes_value = _options(self)
        repeated: list[str] = []
        rest = iter(args)
        needs = f"{_CFG_OPTIONS} must be followed by KEY=VALUE, as in train_cfg.max_epochs=3"
        before = ""
        for arg in rest:
            if before == _CFG_OPTIONS and not _ASSIGNMENT.match(arg) and not ctx.resilient_parsing:
                ctx.fail(f"{needs}, but by {arg!r}")
            before = arg
            if arg == "--":
                repeated += [arg, *rest]
            elif _ASSIGNMENT.match(arg):
                repeated += [_CFG_OPTIONS, arg]
            elif arg != _CFG_OPTIONS:  # the values that follow are recognised by their own form
                repeated += [arg, *islice(rest, takes_value.get(arg, False))]
        if before == _CFG_OPTIONS and not ctx.resilient_parsing:
            ctx.fail(f"{needs}, but is the last word")
        return super().parse_args(ctx, repeated)


_OF_SCRIPTS = ("--log-dir",)  # which many scripts have, also where their own text does not show it


class ScriptCommand(TyperCommand):
    """A command that runs a script: its own options may come before and after the script's name.

    All other arguments after the name belong to the script, and so does everything after ``--``. A line says which of
    the command's own options came after the name, if the script might have them, too. An option that is nearly one of
    the command's, and that the script's text does not have, is refused: the job would run on one rank.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Move the command's own options to the front, and put ``--`` before the script."""
        takes_value = _options(self)
        own: list[str] = []
        script: list[str] = []
        late: list[str] = []
        others: list[str] = []  # options that go to the script
        rest = iter(args)
        for arg in rest:
            name, equals, _ = arg.partition("=")
            if arg == "--":
                script += rest
            elif name in takes_value and (not script or name.startswith("--")):
                own.append(arg)
                late += [name] if script else []
                if takes_value[name] and not equals:
                    value = next(rest, None)
                    if value is None:
                        return super().parse_args(ctx, own)  # reports the missing value
                    own.append(value)
            elif not script and arg.startswith("-"):
                own.append(arg)  # help, or unknown: the parser reports it
            else:
                others += [name] if script and name.startswith("--") else []
                script.append(arg)
        text = ""
        if late + others and not ctx.resilient_parsing:
            with suppress(OSError, UnicodeError):  # a module, or no file that can be read
                text = Path(script[0]).read_text(encoding="utf-8")
            if told := [name for name in late if name in _OF_SCRIPTS or _has(text, name)]:
                say(f"`lockstep launch` takes {', '.join(told)}; after --, {script[0]} would")
        for name in others if text else ():
            is_its_own = name in text or name.strip("-").replace("-", "_") in text  # also as a field of a dataclass
            meant = None if is_its_own else _nearly(name, takes_value)
            if meant is not None and meant not in _OF_SCRIPTS:
                ctx.fail(
                    f"`{name}` is no option of lockstep launch, and {script[0]} does not have it either: did you "
                    f"mean `{meant}`? After -- it goes to the script"
                )
        return super().parse_args(ctx, [*own, "--", *script])


def _has(script: str, option: str) -> bool:
    """Return whether a script's text has an option: as it is typed, or as the name of a field, as of a dataclass."""
    field = option.strip("-").replace("-", "_")
    return re.search(rf"[\"']{option}[\"']|^\s*{field}\s*:", script, re.MULTILINE) is not None


def _nearly(name: str, options: Iterable[str]) -> str | None:
    """Return the option that is misspelt, or that another launcher calls `name`; None if there is none.

    Example:
        >>> _nearly("--nproc_per_node", ["--nproc"]), _nearly("--epochs", ["--nproc"])
        ('--nproc', None)
    """
    plain = name.replace("_", "-")
    known = [option for option in options if option.startswith("--")]
    begins = (option for option in known if plain.startswith(option))
    return next(begins, None) or next(iter(get_close_matches(plain, known, 1, 0.85)), None)


def _options(command: TyperCommand) -> dict[str, bool]:
    """Return the names of a command's options, and whether each takes a value."""
    return {
        name: not getattr(parameter, "is_flag", False)
        for parameter in command.params
        if parameter.param_type_name == "option"
        for name in parameter.opts
    }


def print_error(error: Exception) -> None:
    """Print an input error once per node: usually every rank of a job raises the same one."""
    from rich.console import Console
    from rich.text import Text

    if topology_if_known(os.environ).local_rank > 0:
        # Local rank 0 prints the error and exits, and then most launchers stop the others. A rank that is still running
        # after that has a different error.
        time.sleep(_SECONDS_FOR_RANK_0)
    notes = getattr(error, "__notes__", ())
    text = Text.assemble(
        ("error: ", "bold red"), printable(mask_text("\n".join([message_of(error), *map(str, notes)])))
    )
    Console(stderr=True, soft_wrap=True).print(text)
