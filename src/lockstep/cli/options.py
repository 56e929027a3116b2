"""Options that several commands share, as dataclasses. A command with many options is a dataclass, see `command`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Protocol, get_type_hints

import typer

from lockstep.launch import NUMA_MODES, JobSpec


def completing(*names: str) -> Callable[[str], list[str]]:
    """Return what completes these names in a shell."""
    return lambda incomplete: [name for name in names if name.startswith(incomplete)]


def whole_number(at_least: int, **options: Any) -> Any:
    """Return an option that takes a whole number; any other value is a usage error that shows the value."""

    def parse(value: str) -> int:
        try:
            number = int(value)
        except ValueError:
            number = at_least - 1
        if number < at_least:
            raise typer.BadParameter(f"must be a whole number, {at_least} or more, but is {value}")
        return number

    return typer.Option(parser=parse, **{"metavar": "N", **options})


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
_rank_number = partial(whole_number, rich_help_panel="Ranks")

Nproc = Annotated[
    int | None,
    rank_option(
        parser=_count,
        metavar="N",
        help="Ranks on this machine. Default: 1. MIN:MAX: as many as are left start again, see --max-restarts.",
    ),
]
ConfigPath = Annotated[Path, typer.Argument(metavar="CONFIG", help="A Python, YAML or JSON file.")]
CfgOptions = Annotated[
    list[str] | None,
    typer.Option(
        "--cfg-options",
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
GraceSeconds = Annotated[
    int, _rank_number(0, metavar="SECONDS", help="How long ranks may take to save and end after a signal.")
]
Numa = Annotated[
    str | None,
    typer.Option(
        metavar="|".join(NUMA_MODES),
        help="Bind each rank to CPUs near its GPU, as torchrun does.",
    ),
]
MaxRestarts = Annotated[int, _rank_number(0, help="How often all ranks start again after one failed.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankOptions:
    """Options for the number of ranks and machines."""

    nproc: Nproc = None
    nnodes: Annotated[
        int,
        rank_option(
            parser=_count,
            metavar="N",
            help="Machines of the job; call this on each. MIN:MAX: it goes on without machines that are lost.",
        ),
    ] = 1
    node_rank: Annotated[int, _rank_number(0, help="Which of the machines this is.")] = 0
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
            return JobSpec(self.nproc or 1, self.nnodes, self.node_rank, self.rdzv, least, least_nodes)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None


class Command(Protocol):
    """A dataclass of options that can be run."""

    def run(self) -> None:
        """Run the command."""


def command(options: type[Command]) -> Callable[..., None]:
    """Return a function that Typer can use as a command: it has one parameter for each field of a dataclass."""

    def run(**values: Any) -> None:
        options(**values).run()

    hints = get_type_hints(options, include_extras=True)
    parameters = inspect.signature(options).parameters.values()
    run.__doc__ = options.__doc__
    run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [parameter.replace(annotation=hints[parameter.name]) for parameter in parameters]
    )
    return run
