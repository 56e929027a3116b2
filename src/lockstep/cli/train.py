"""`lockstep train`: a config, trained in this process, in ranks that are found, or in ranks that are started."""

from __future__ import annotations

import os
import sys
from inspect import signature
from pathlib import Path
from typing import Annotated

import typer

from lockstep.cli.config import apply_options, read_config
from lockstep.cli.options import CfgOptions, ConfigPath, MaxRestarts, Nnodes, NodeRank, Nproc, Rdzv, layout_of
from lockstep.config import Config
from lockstep.errors import TopologyError
from lockstep.launch import Layout


def train(
    ctx: typer.Context,
    config: ConfigPath,
    nproc: Nproc = None,
    nnodes: Nnodes = 1,
    node_rank: NodeRank = 0,
    rdzv: Rdzv = None,
    max_restarts: MaxRestarts = 0,
    cfg_options: CfgOptions = None,
    work_dir: Annotated[
        Path | None, typer.Option(help="Folder of the run. Default: the config's, else work_dirs/NAME.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the last checkpoint in the work dir.")] = False,
    launcher: Annotated[
        str | None,
        typer.Option(
            metavar="[none|pytorch|slurm|mpi]",
            help="Whose ranks to join. Default: found in the environment; none starts own ones.",
        ),
    ] = None,
    rank: Annotated[bool, typer.Option("--rank", hidden=True)] = False,
) -> None:
    """Train what CONFIG describes.

    In this process; in --nproc ranks that are started here; or, under torchrun, mpirun or srun, in the ranks found.
    """
    if rank:
        ctx.find_root().obj = "rank"
    layout = layout_of(nproc, nnodes, node_rank, rdzv)
    cfg = read_config(config)

    from lockstep.dist.environ import infer_launcher  # imports torch, as all that follows does
    from lockstep.runner import Runner

    apply_options(cfg, cfg_options or [], known=signature(Runner).parameters.keys())
    cfg.work_dir = str(work_dir or cfg.get("work_dir") or default_work_dir(config))
    cfg.resume = resume or cfg.get("resume", False)
    found = launcher or infer_launcher(os.environ)
    if found != "none":
        _check_agreement(found, nproc, nnodes, silent=rank)
    cfg.launcher = found
    runner = Runner.from_cfg(cfg)  # builds nothing yet, but finds what is wrong before ranks are started
    if found == "none" and (layout.nproc > 1 or layout.nnodes > 1 or max_restarts):
        _start_ranks(config, cfg, layout, max_restarts, cfg_options or [])
    else:
        runner.train()


def default_work_dir(config: Path) -> Path:
    """Return ``work_dirs/`` and the name of the config, or of its folder where it is just called config."""
    path = config.resolve()
    return Path("work_dirs") / (path.parent.name if path.stem == "config" else path.stem)


def _check_agreement(launcher: str, nproc: int | None, nnodes: int, *, silent: bool) -> None:
    """Compare the options with the ranks that are found."""
    from lockstep.dist.environ import read_topology

    topology = read_topology(os.environ, launcher)
    for option, wanted, there in (
        ("--nproc", nproc, topology.local_size),
        ("--nnodes", nnodes if nnodes > 1 else None, topology.num_nodes),
    ):
        if wanted is not None and wanted != there:
            raise TopologyError(
                f"`{option}` must agree with the ranks found in the environment ({launcher}), {there}, but is "
                f"{wanted}. Leave it out to join them, or give --launcher none to start others"
            )
    if topology.rank == 0 and not silent:
        print(f"lockstep: joining the ranks found ({launcher}): {topology.world_size}", file=sys.stderr)


def _start_ranks(config: Path, cfg: Config, layout: Layout, max_restarts: int, cfg_options: list[str]) -> None:
    from lockstep.launch import launch

    command = ["-m", "lockstep", "train", str(config), "--launcher", "pytorch", "--rank"]
    command += ["--work-dir", cfg.work_dir]
    command += ["--resume"] if cfg.resume else []
    command += [word for option in cfg_options for word in ("--cfg-options", option)]
    launch(
        command,
        nproc=layout.nproc,
        nnodes=layout.nnodes,
        node_rank=layout.node_rank,
        rdzv=layout.rdzv,
        max_restarts=max_restarts,
        log_dir=Path(cfg.work_dir) / "ranks",
    )
