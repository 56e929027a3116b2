"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lockstep.launch import Layout

_RANKS = "Ranks"

Nproc = Annotated[int | None, typer.Option(min=1, help="Ranks on this machine. Default: 1.", rich_help_panel=_RANKS)]
Nnodes = Annotated[int, typer.Option(min=1, help="Machines of the job; call this on each.", rich_help_panel=_RANKS)]
NodeRank = Annotated[int, typer.Option(min=0, help="Which of the machines this is.", rich_help_panel=_RANKS)]
Rdzv = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT",
        help="Where several machines meet: an address of node 0, and a free port there.",
        rich_help_panel=_RANKS,
    ),
]
MaxRestarts = Annotated[
    int, typer.Option(min=0, help="How often all ranks start again after one failed.", rich_help_panel=_RANKS)
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
Strategy = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="How the model is laid over ranks, whatever the config says; `lockstep strategies` shows the names.",
    ),
]
WorkDir = Annotated[Path | None, typer.Option(help="Folder of the run. Default: the config's, else work_dirs/NAME.")]
Launcher = Annotated[
    str | None,
    typer.Option(
        metavar="[none|pytorch|slurm|mpi]",
        help="Whose ranks to join. Default: found in the environment; none starts own ones.",
        rich_help_panel=_RANKS,
    ),
]
Check = Annotated[
    bool, typer.Option("--check/--no-check", help="Look for errors in the whole config before anything is started.")
]
# Set by the process that starts the ranks.
AsRank = Annotated[bool, typer.Option("--rank", hidden=True)]


def layout_of(nproc: int | None, nnodes: int, node_rank: int, rdzv: str | None) -> Layout:
    """Return the layout that the options describe, or end with a usage error."""
    try:
        return Layout(nproc or 1, nnodes, node_rank, rdzv)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
