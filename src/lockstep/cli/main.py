"""`lockstep`: the table of its commands, the short commands themselves, and exit codes."""

from __future__ import annotations

import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

from lockstep.cli.checkpoints import checkpoints_app
from lockstep.cli.config import check, print_config
from lockstep.cli.doctor import Doctor
from lockstep.cli.export import Export
from lockstep.cli.jobs import Predict, Test, Train, ignore_stop_signals
from lockstep.cli.options import (
    CfgOptionsCommand,
    LaunchOptions,
    ScriptCommand,
    command,
    print_error,
)
from lockstep.errors import INPUT_ERRORS, LaunchError, Preempted, nearest
from lockstep.launch import launch
from lockstep.launch.worker import end_soon, show_error
from lockstep.location import is_of_disk
from lockstep.output import require_shown, tolerate_closed_output
from lockstep.report import find_run, read_run, write_page
from lockstep.version import __version__

_INTERRUPTED = 130  # what a shell reports for SIGINT
_PRINT_ASIDE = (["train"], ["predict"], ["launch"])  # are not called for what they print


class _Commands(TyperGroup):
    """The group of all commands; turns input errors into one message and an exit code."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the options; the help shows no type for those without a value, by default it is `<bool>`."""
        return _without_types(super().get_params(ctx))

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command, whose help likewise shows no type for options without a value."""
        found: Any = super().get_command(ctx, cmd_name)
        for each in (found, *getattr(found, "commands", {}).values()):
            _without_types(each.get_params(ctx) if each is not None else [])
        return found

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise typer.Exit(_INTERRUPTED) from None
        except (*INPUT_ERRORS, OSError) as error:
            if isinstance(error, OSError) and not is_of_disk(error):
                raise
            print_error(error)
            raise typer.Exit(getattr(error, "exit_code", 1)) from None


def _without_types(parameters: list[Any]) -> list[Any]:
    for parameter in parameters:
        if getattr(parameter, "is_flag", False):
            parameter.metavar = ""
    return parameters


@dataclass(frozen=True, kw_only=True)
class Launch(LaunchOptions):
    """Run any script on several ranks.

    The options may come before or after SCRIPT. -- ends them: everything after it belongs to the script, also an option
    of the same name.
    """

    script: Annotated[list[str], typer.Argument(metavar="SCRIPT [ARGS]", help="A script and its arguments.")]
    module: Annotated[bool, typer.Option("-m", help="SCRIPT is a module, as in python -m.")] = False
    log_dir: Annotated[
        Path | None, typer.Option(help="Write what ranks other than 0 print to rank_N.log in this folder.")
    ] = None

    def run(self) -> None:
        """Start the ranks, and return when they have ended."""
        job = self.job_spec()
        if not self.module:
            _require_script(self.script[0])
        words = ["-m", *self.script] if self.module else self.script
        launch(words, job, log_dir=self.log_dir, **self.of_launch())


def _require_script(name: str) -> None:
    """Raise a `LaunchError` if there is no such script."""
    path = Path(name)
    if path.is_dir():
        raise LaunchError(f"SCRIPT must be a file, but `{name}` is a folder. To run a module, use -m")
    if not path.is_file():
        near = nearest(path.name, (one.name for one in path.parent.glob("*")))
        hint = f": did you mean `{path.with_name(near)}`?" if near else ". To run a module, use -m"
        raise LaunchError(f"the script `{name}` does not exist{hint}")


def report(
    run_dir: Annotated[
        Path, typer.Argument(metavar="RUN_DIR", help="Folder of a run, or of several runs; the last one is used.")
    ],
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The page. Default: report.html in the run's folder.")
    ] = None,
) -> None:
    """Write the records of a run to one HTML page.

    The page shows curves, slow ranks, evaluations, config and environment, and needs no network.
    """
    run = read_run(find_run(run_dir))
    page = out.expanduser() if out else run.folder / "report.html"  # a shell leaves the ~ of --out=~/file as it is
    write_page(run, page)
    for fault in run.faults:
        print(f"warning: {fault}", file=sys.stderr)
    print(page)


app = typer.Typer(
    name="lockstep",
    cls=_Commands,
    help="Distributed training for PyTorch: one process, a laptop's cores, several hosts.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("train", cls=CfgOptionsCommand)(command(Train))
app.command("test", cls=CfgOptionsCommand)(command(Test))
app.command("predict", cls=CfgOptionsCommand)(command(Predict))
app.command("launch", cls=ScriptCommand)(command(Launch))
app.command("export")(command(Export))
app.command("doctor")(command(Doctor))
app.command("report")(report)

config_app = typer.Typer(help="Look at configs: print one, check one.", no_args_is_help=True)
config_app.command("print", cls=CfgOptionsCommand)(print_config)
config_app.command("check", cls=CfgOptionsCommand)(check)
app.add_typer(config_app, name="config")
app.add_typer(checkpoints_app, name="checkpoints")


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
    tolerate_closed_output()
    if sys.excepthook is sys.__excepthook__:  # else the launcher's, which masks secrets, too, or somebody's own
        sys.excepthook = show_error
    try:
        get_command(app)()  # `app()` would put typer's own hook there
    except SystemExit as error:
        if not error.code:
            if sys.argv[1:2] not in _PRINT_ASIDE:
                try:
                    require_shown()
                except LaunchError as lost:
                    print_error(lost)
                    raise SystemExit(1) from lost
            ignore_stop_signals()
        if error.code == Preempted.EXIT_CODE:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C once more would change the exit code
            end_soon(Preempted.EXIT_CODE)
        raise
