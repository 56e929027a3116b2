"""`lockstep train`: a config, trained in this process, in ranks that are found, or in ranks that are started."""

from __future__ import annotations

from typing import Annotated

import typer

from lockstep.cli.job import open_job
from lockstep.cli.options import (
    AsRank,
    CfgOptions,
    Check,
    ConfigPath,
    Launcher,
    MaxRestarts,
    Nnodes,
    NodeRank,
    Nproc,
    Rdzv,
    Strategy,
    WorkDir,
    layout_of,
)


def train(
    ctx: typer.Context,
    config: ConfigPath,
    nproc: Nproc = None,
    nnodes: Nnodes = 1,
    node_rank: NodeRank = 0,
    rdzv: Rdzv = None,
    max_restarts: MaxRestarts = 0,
    strategy: Strategy = None,
    cfg_options: CfgOptions = None,
    work_dir: WorkDir = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the last checkpoint in the work dir.")] = False,
    check: Check = True,
    launcher: Launcher = None,
    rank: AsRank = False,
) -> None:
    """Train what CONFIG describes.

    In this process; in --nproc ranks that are started here; or, under torchrun, mpirun or srun, in the ranks found.
    """
    job = open_job(
        ctx,
        config,
        nproc=nproc,
        layout=layout_of(nproc, nnodes, node_rank, rdzv),
        max_restarts=max_restarts,
        strategy=strategy,
        cfg_options=cfg_options or [],
        work_dir=work_dir,
        launcher=launcher,
        is_rank=rank,
    )
    job.cfg.resume = resume or job.cfg.get("resume") or False
    job.check(needed=("model", "train_dataloader"), wanted=check)
    from lockstep.runner import Runner  # imports torch

    runner = Runner.from_cfg(job.cfg)  # builds nothing yet
    if job.starts_ranks:
        job.start_ranks(["train", *(["--resume"] if job.cfg.resume else [])], max_restarts)
    else:
        runner.train()
