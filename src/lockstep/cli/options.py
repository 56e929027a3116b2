"""Options that several commands have, as dataclasses: a command takes one, and Typer sees an option for each field."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from lockstep.launch import JobSpec

_RANKS = "Ranks"

Nproc = Annotated[int | None, typer.Option(min=1, help="Ranks on this machine. Default: 1.", rich_help_panel=_RANKS)]
ConfigPath = Annotated[Path, typer.Argument(metavar="CONFIG", help="A Python, YAML or JSON file.")]
CfgOptions = Annotated[
    list[str] | None,
    typer.Option(
        "--cfg-options",
        metavar="KEY=VALUE ...",
        help="Change the config: a.b=1 c.0=[1,2]. The name of this option may be left out.",
    ),
]
MaxRestarts = Annotated[
    int, typer.Option(min=0, help="How often all ranks start again after one failed.", rich_help_panel=_RANKS)
]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankOptions:
    """How many ranks are started, and on how many machines."""

    nproc: Nproc = None
    nnodes: Annotated[
        int, typer.Option(min=1, help="Machines of the job; call this on each.", rich_help_panel=_RANKS)
    ] = 1
    node_rank: Annotated[int, typer.Option(min=0, help="Which of the machines this is.", rich_help_panel=_RANKS)] = 0
    rdzv: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="Where several machines meet: an address of node 0, and a free port there.",
            rich_help_panel=_RANKS,
        ),
    ] = None

    def job_spec(self) -> JobSpec:
        """Return what the options describe, or end with a usage error."""
        try:
            return JobSpec(self.nproc or 1, self.nnodes, self.node_rank, self.rdzv)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions(RankOptions):
    """A config, what is changed in it, and the ranks that run it."""

    config: ConfigPath
    strategy: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="How the model is laid over ranks, whatever the config says; `lockstep strategies` shows the names.",
        ),
    ] = None
    cfg_options: CfgOptions = None
    work_dir: Annotated[
        Path | None, typer.Option(help="Folder of the run. Default: the config's, else work_dirs/NAME.")
    ] = None
    check: Annotated[
        bool,
        typer.Option("--check/--no-check", help="Look for errors in the whole config before anything is started."),
    ] = True
    launcher: Annotated[
        str | None,
        typer.Option(
            metavar="[none|pytorch|slurm|mpi]",
            help="Whose ranks to join. Default: found in the environment; none starts own ones.",
            rich_help_panel=_RANKS,
        ),
    ] = None


def takes_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command, in place of its parameter `options`, a parameter for each field of that dataclass."""
    own = inspect.signature(command).parameters
    hints = get_type_hints(command, include_extras=True)
    made = hints["options"]
    names = [field.name for field in fields(made)]

    def with_options(**values: Any) -> None:
        command(options=made(**{name: values.pop(name) for name in names}), **values)

    annotations = {**get_type_hints(made, include_extras=True), **hints}
    defaults = {name: parameter.default for name, parameter in own.items()}
    defaults |= {
        field.name: inspect.Parameter.empty if field.default is MISSING else field.default for field in fields(made)
    }
    order = [name for parameter in own for name in (names if parameter == "options" else [parameter])]
    with_options.__doc__ = command.__doc__
    with_options.__annotations__ = {name: annotations[name] for name in order}
    with_options.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=defaults[name], annotation=annotations[name]
            )
            for name in order
        ]
    )
    return with_options
