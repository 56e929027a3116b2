"""`lockstep launch`: any script or module on several ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lockstep.cli.options import MaxRestarts, RankOptions, takes_options
from lockstep.errors import LaunchError


@takes_options
def launch_script(
    script: Annotated[list[str], typer.Argument(metavar="SCRIPT [ARGS]", help="A script and its arguments.")],
    options: RankOptions,
    module: Annotated[bool, typer.Option("-m", help="SCRIPT is a module, as in python -m.")] = False,
    max_restarts: MaxRestarts = 0,
    log_dir: Annotated[
        Path | None, typer.Option(help="Write what ranks other than 0 print to rank_N.log in this folder.")
    ] = None,
) -> None:
    """Run any script on several ranks.

    The options may stand before or after SCRIPT; what comes after -- is the script's in any case.
    """
    job = options.job_spec()
    if not module and not Path(script[0]).is_file():
        raise LaunchError(f"there is no script `{script[0]}`; a module takes -m")
    from lockstep.launch import launch  # imports torch

    launch(
        ["-m", *script] if module else script,
        job,
        max_restarts=max_restarts,
        log_dir=log_dir,
    )
