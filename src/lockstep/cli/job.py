"""What `lockstep train` and `lockstep test` have in common: a config, and ranks that are here, found or started."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import typer

from lockstep.cli.config import apply_options, read_config
from lockstep.config import Config
from lockstep.errors import TopologyError
from lockstep.launch import Layout
from lockstep.topology import infer_launcher, read_topology


@dataclass(frozen=True, slots=True)
class Job:
    """A config, and the ranks that are to run it.

    Attributes:
        file: the config's.
        cfg: the config, with `work_dir` and `launcher` set.
        layout: of ranks that are to be started.
        starts_ranks: whether they are; else this process is one of those that are here already.
        is_rank: whether this process is one that such a job has started.
        strategy: what takes the place of the config's strategy; None leaves it.
        cfg_options: the changes to the file, as they were given.
    """

    file: Path
    cfg: Config
    layout: Layout
    starts_ranks: bool
    is_rank: bool
    strategy: str | None
    cfg_options: Sequence[str]

    def check(self, needed: Collection[str], *, wanted: bool) -> None:
        """Find what is wrong with the config before anything is started, if that is `wanted`."""
        if wanted and not self.is_rank:
            from lockstep.lint import check_config

            check_config(self.cfg, needed)

    def start_ranks(self, command: Sequence[str], max_restarts: int) -> None:
        """Run a lockstep command with this job's config on ranks that are started here, until they have ended."""
        from lockstep.launch import launch
        from lockstep.runner.start import make_folder

        log_dir = Path(self.cfg.work_dir) / "ranks"
        make_folder(log_dir)
        words = [command[0], str(self.file), *command[1:], "--launcher", "pytorch", "--rank"]
        words += ["--work-dir", self.cfg.work_dir]
        words += ["--strategy", self.strategy] if self.strategy else []
        words += [word for option in self.cfg_options for word in ("--cfg-options", option)]
        launch(
            ["-m", "lockstep", *words],
            nproc=self.layout.nproc,
            nnodes=self.layout.nnodes,
            node_rank=self.layout.node_rank,
            rdzv=self.layout.rdzv,
            max_restarts=max_restarts,
            log_dir=log_dir,
        )


def open_job(
    ctx: typer.Context,
    file: Path,
    *,
    nproc: int | None,
    layout: Layout,
    max_restarts: int,
    strategy: str | None,
    cfg_options: Sequence[str],
    work_dir: Path | None,
    launcher: str | None,
    is_rank: bool,
) -> Job:
    """Read a config with its options, and see where its ranks come from.

    Raises:
        ConfigError: the config cannot be read, or an option does not fit.
        TopologyError: the options contradict the ranks that are found.
    """
    if is_rank:
        ctx.find_root().obj = "rank"
    cfg = read_config(file)
    if strategy is not None:
        cfg.strategy = {"type": strategy}
    apply_options(cfg, cfg_options)

    found = launcher or infer_launcher(os.environ)
    if found != "none":
        _check_agreement(found, nproc, layout.nnodes, silent=is_rank)
    cfg.work_dir = str(work_dir or cfg.get("work_dir") or default_work_dir(file))
    cfg.launcher = found
    starts_ranks = found == "none" and (layout.nproc > 1 or layout.nnodes > 1 or max_restarts > 0)
    return Job(file, cfg, layout, starts_ranks, is_rank, strategy, cfg_options)


def default_work_dir(config: Path) -> Path:
    """Return ``work_dirs/`` and the name of the config, or of its folder where it is just called config."""
    path = config.resolve()
    return Path("work_dirs") / (path.parent.name if path.stem == "config" else path.stem)


def _check_agreement(launcher: str, nproc: int | None, nnodes: int, *, silent: bool) -> None:
    """Compare the options with the ranks that are found."""
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
