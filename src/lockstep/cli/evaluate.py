"""`lockstep test`: what a trained model is worth."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lockstep.cli.job import open_job
from lockstep.cli.options import (
    AsRank,
    CfgOptions,
    Check,
    ConfigPath,
    Launcher,
    Nnodes,
    NodeRank,
    Nproc,
    Rdzv,
    Strategy,
    WorkDir,
    layout_of,
)
from lockstep.errors import ConfigError

if TYPE_CHECKING:
    from lockstep.config import Config
    from lockstep.runner import Runner


def evaluate(
    ctx: typer.Context,
    config: ConfigPath,
    checkpoint: Annotated[
        Path, typer.Option(metavar="PATH", help="The model: a checkpoint of a run, or a file of weights.")
    ],
    nproc: Nproc = None,
    nnodes: Nnodes = 1,
    node_rank: NodeRank = 0,
    rdzv: Rdzv = None,
    strategy: Strategy = None,
    cfg_options: CfgOptions = None,
    work_dir: WorkDir = None,
    check: Check = True,
    launcher: Launcher = None,
    rank: AsRank = False,
) -> None:
    """Test the model of a checkpoint on the test data of CONFIG, or on its validation data where it has no other.

    In this process; in --nproc ranks that are started here; or, under torchrun, mpirun or srun, in the ranks found.
    """
    job = open_job(
        ctx,
        config,
        nproc=nproc,
        layout=layout_of(nproc, nnodes, node_rank, rdzv),
        max_restarts=0,
        strategy=strategy,
        cfg_options=cfg_options or [],
        work_dir=work_dir,
        launcher=launcher,
        is_rank=rank,
    )
    job.cfg.update(load_from=str(_existing(checkpoint)), resume=False)
    mode = _mode(job.cfg)
    job.check(needed=("model", f"{mode}_dataloader"), wanted=check)
    from lockstep.runner import Runner  # imports torch

    runner = Runner.from_cfg(job.cfg)  # builds nothing yet
    if job.starts_ranks:
        job.start_ranks(["test", "--checkpoint", job.cfg.load_from], max_restarts=0)
        return
    metrics = runner.test() if mode == "test" else runner.val()
    if runner.rank == 0:
        _print_table(mode, metrics, runner)


def _mode(cfg: Config) -> str:
    return "val" if cfg.get("test_dataloader") is None and cfg.get("val_dataloader") is not None else "test"


def _existing(checkpoint: Path) -> Path:
    from lockstep.checkpoint import is_checkpoint

    if not (checkpoint.is_file() or is_checkpoint(checkpoint)):
        raise ConfigError(f"`--checkpoint` must be a checkpoint of a run or a file of weights, but is {checkpoint}")
    return checkpoint.resolve()


def _print_table(mode: str, metrics: Mapping[str, Any], runner: Runner) -> None:
    from rich.table import Table

    data = {"test": "test data", "val": "validation data"}[mode]
    units = getattr(runner, f"{mode}_evaluator").units
    table = Table("metric", data, title=str(runner.given.load_from), title_justify="left")
    for name, value in metrics.items():
        number = f"{value:.6g}" if isinstance(value, float) else str(value)
        table.add_row(name, f"{number} {units.get(name, '')}".rstrip())
    runner.console.print(table)
