"""`lockstep`: its commands, and how they end."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from lockstep.cli.config import check, diff, print_config
from lockstep.cli.doctor import doctor, strategies
from lockstep.cli.errors import tell
from lockstep.cli.jobs import test, train
from lockstep.cli.launch import launch_script
from lockstep.cli.report import report
from lockstep.cli.words import CfgOptionsCommand, ScriptCommand
from lockstep.errors import INPUT_ERRORS
from lockstep.version import __version__

_INTERRUPTED = 130  # what a shell reports for SIGINT


class _Commands(TyperGroup):
    """Turns errors of input into one message and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise typer.Exit(_INTERRUPTED) from None
        except INPUT_ERRORS as error:
            tell(error)
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
app.command("test", cls=CfgOptionsCommand)(test)
app.command("launch", cls=ScriptCommand)(launch_script)
app.command("doctor")(doctor)
app.command("strategies")(strategies)
app.command("report")(report)

config_app = typer.Typer(help="Look at configs: print one, check one, compare two.", no_args_is_help=True)
config_app.command("print", cls=CfgOptionsCommand)(print_config)
config_app.command("check", cls=CfgOptionsCommand)(check)
config_app.command("diff")(diff)
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


def main() -> None:
    """Run the command line of this process."""
    app()
