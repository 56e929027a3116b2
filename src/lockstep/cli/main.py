"""`lockstep`: its commands, and how they end."""

from __future__ import annotations

import os
import time
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from lockstep.cli.arguments import CfgOptionsCommand, ScriptCommand
from lockstep.cli.config import print_config
from lockstep.cli.doctor import doctor
from lockstep.cli.launch import launch_script
from lockstep.cli.train import train
from lockstep.errors import ConfigError, LaunchError, RegistryError, TopologyError
from lockstep.version import __version__

# What the user has to put right: one message, no traceback.
_INPUT_ERRORS = (ConfigError, LaunchError, RegistryError, TopologyError)
_INTERRUPTED = 130  # what a shell reports for SIGINT
_SECONDS_FOR_THE_FIRST_RANK = 3.0


class _Commands(TyperGroup):
    """Turns errors of input into one message and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise typer.Exit(_INTERRUPTED) from None
        except _INPUT_ERRORS as error:
            if ctx.obj == "rank":  # whoever started this rank tells it, once for all of them
                raise
            _tell(error)
            raise typer.Exit(1) from None


app = typer.Typer(
    name="lockstep",
    cls=_Commands,
    help="Distributed training for PyTorch: one process, a laptop's cores, a cluster of GPUs.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("train", cls=CfgOptionsCommand)(train)
app.command("launch", cls=ScriptCommand)(launch_script)
app.command("doctor")(doctor)

config_app = typer.Typer(help="Look at configs.", no_args_is_help=True)
config_app.command("print", cls=CfgOptionsCommand)(print_config)
app.add_typer(config_app, name="config")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _lockstep(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def _tell(error: Exception) -> None:
    """Print an error of input, which all ranks of a job tend to meet alike, once for each node."""
    from rich.console import Console
    from rich.text import Text

    if _local_rank() > 0:
        # The first rank tells it and ends, and with it most launchers the others; who is still here is alone with it.
        time.sleep(_SECONDS_FOR_THE_FIRST_RANK)
    notes = getattr(error, "__notes__", ())
    text = Text.assemble(("error: ", "bold red"), "\n".join([str(error), *notes]))
    Console(stderr=True, soft_wrap=True).print(text)


def _local_rank() -> int:
    from lockstep.dist.environ import infer_launcher, read_topology  # imports torch

    try:
        return read_topology(os.environ, infer_launcher(os.environ)).local_rank
    except TopologyError:
        return 0


def main() -> None:
    """Run the command line of this process."""
    app()
