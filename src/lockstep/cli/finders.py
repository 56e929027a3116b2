"""`lockstep find-lr` and `find-batch-size`: searches with the training that a config describes."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lockstep.cli.jobs import Job
from lockstep.config import Config
from lockstep.errors import TopologyError, counted
from lockstep.launch.notices import loading_torch
from lockstep.report import read_run, write_page
from lockstep.topology import infer_launcher

if TYPE_CHECKING:
    from lockstep.runner import Runner
    from lockstep.runner.batch_size_finder import BatchSizeSearch, Trial
    from lockstep.runner.lr_finder import LRSearch


@dataclass(frozen=True, slots=True, kw_only=True)
class FindLR(Job):
    """Search a learning rate for the training that CONFIG describes, and draw the loss over it.

    The model trains at rising rates; nothing is saved but the records. It runs in this process; in --nproc ranks that
    are started here; or, under torchrun, mpirun or srun, in their ranks.
    """

    start_lr: Annotated[float, typer.Option("--start", metavar="RATE", help="The first rate.")] = 1e-7
    end_lr: Annotated[float, typer.Option("--end", metavar="RATE", help="The last rate.")] = 1.0
    steps: Annotated[int, typer.Option(metavar="N", help="Number of updates, one at each rate; at least 10.")] = 100

    def complete(self, cfg: Config) -> None:
        """Check the range, and begin with the weights of `load_from`, if any, rather than inside of a training."""
        from lockstep.runner.lr_finder import check_range  # imports torch

        check_range(self.start_lr, self.end_lr, self.steps)
        cfg.resume = False

    def execute(self, cfg: Config) -> None:
        """Search, and print what has been found."""
        from lockstep.runner import Runner  # imports torch

        runner = Runner.from_cfg(cfg)
        found = runner.find_lr(self.start_lr, self.end_lr, self.steps)
        if runner.rank == 0:
            page = runner.run.run_dir / "report.html"
            write_page(read_run(page.parent), page)
            for name, text in {**_advice(found, runner), "picture": str(page)}.items():
                runner.console.print(f"{name:7} {text}", markup=False, soft_wrap=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class FindBatchSize(Job):
    """Search the largest batch size per rank with which the training that CONFIG describes fits into memory.

    Each size is tried by --nproc ranks that are started for it; they train for some updates and end. The size is
    doubled until a rank runs out of memory, or the data end. Learning rates are not changed.
    """

    max_batch_size: Annotated[int | None, typer.Option(metavar="N", help="The last size to try, per rank.")] = None
    bisect: Annotated[
        bool, typer.Option("--bisect", help="Go on between the largest size that fits and the one that does not.")
    ] = False
    updates: Annotated[int, typer.Option(min=2, metavar="N", help="Updates of the model with each size.")] = 3
    memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help="What each rank may allocate on CPUs, as 8GiB. Default: its share of what is free."
        ),
    ] = None

    def complete(self, cfg: Config) -> None:
        """Begin with the weights of `load_from`, if any, rather than inside of a training."""
        cfg.resume = False

    def run(self) -> None:
        """Search, and print what has been found."""
        self._check_ranks()
        with loading_torch(f"loading torch to search a batch size for {self.config}"):
            cfg = self.read()
            from lockstep.lint import check_config  # imports torch
            from lockstep.runner.batch_size_finder import TrialRanks, batch_size_in, search_sizes
            from lockstep.runner.start import make_folder
            from lockstep.weights.safetensors_file import read_size

        memory = None if self.memory is None else read_size(self.memory, "--memory")
        if self.check:
            check_config(cfg, needed=("model", "train_dataloader"))
        start = batch_size_in(cfg)
        make_folder(Path(cfg.work_dir))
        print("batch size per rank")
        nproc = self.nproc or 1
        ranks = TrialRanks(_RunnerOfJob(asdict(self)), nproc, self.updates, memory, _print_trial)
        found = search_sizes(ranks.trial, start, self.max_batch_size, bisect=self.bisect, nproc=nproc)
        file = Path(cfg.work_dir) / "batch_size_search.json"
        file.write_text(json.dumps(asdict(found), indent=1) + "\n", encoding="utf-8")
        _print_result(found, start, file, scales_lr=bool((cfg.get("auto_scale_lr") or {}).get("enable")))

    def _check_ranks(self) -> None:
        """Check that this process may start ranks, all of them on this machine.

        Raises:
            TopologyError: it is a rank itself, or the ranks would be on several machines.
        """
        if self.job_spec().nnodes > 1:
            raise TopologyError(
                f"`--nnodes` must be 1 to search a batch size, but is {self.nnodes}. Search on one machine, with "
                "--nproc; what fits there fits on more of them, too"
            )
        launcher = self.launcher or infer_launcher(os.environ)
        if launcher != "none":
            raise TopologyError(
                "`lockstep find-batch-size` must be started once, because it starts ranks for each size, but this "
                f"process is a rank itself ({launcher}). Start it without {launcher}, with --nproc, or give "
                "--launcher none"
            )


@dataclass(frozen=True, slots=True)
class _RunnerOfJob:
    """Makes the Runner for a batch size in a rank, which reads the config itself."""

    options: dict[str, Any]

    def __call__(self, batch_size: int) -> Runner:
        from lockstep.runner.batch_size_finder import RunnerOfConfig

        return RunnerOfConfig(FindBatchSize(**self.options).read())(batch_size)


def _advice(found: LRSearch, runner: Runner) -> dict[str, str]:
    """Return what a search says of the rate, and how to use it."""
    rate = found.suggestion
    if rate is None:
        return {"rate": f"none: the loss does not fall between {found.lrs[0]:g} and {found.lrs[-1]:g}. See the picture"}
    advice = {"rate": f"{rate:.2g}, where the loss falls most steeply"}
    optim = runner.args.optim_wrapper
    if optim is None:
        advice["use"] = f"--cfg-options optim_wrapper.optimizer.type=AdamW optim_wrapper.optimizer.lr={rate:.2g}"
    elif isinstance(optim, Mapping) and isinstance(optim.get("optimizer"), Mapping):
        advice["use"] = f"--cfg-options optim_wrapper.optimizer.lr={rate:.2g}"
    if len(set(found.factors)) > 1:
        several = ", ".join(f"{rate * factor:.2g}" for factor in dict.fromkeys(found.factors))
        advice["groups"] = f"parameter groups then have the rates {several}"
    if found.still_falls:
        advice["note"] = f"the loss still falls at the highest rate: search on, with --end {10 * found.lrs[-1]:g}"
    return advice


def _print_trial(trial: Trial) -> None:
    line = f"{trial.batch_size:10}  {trial.outcome}"
    if trial.memory_mib is not None:
        line += f"  {trial.memory_mib:,.0f} MiB  {trial.samples_per_second:,.0f} samples/s"
    print(line, flush=True)


def _print_result(found: BatchSizeSearch, start: int, file: Path, *, scales_lr: bool) -> None:
    size, nproc = found.batch_size, found.nproc
    ended = {
        "memory": "a larger one runs out of memory",
        "limit": "the limit",
        "samples": "all samples that a rank has",
    }
    print(f"found    {size} per rank, {size * nproc} on {counted(nproc, 'rank')}: {ended[found.ended_by]}")
    print(f"use      --cfg-options train_dataloader.batch_size={size}")
    if scales_lr:
        print("note     `auto_scale_lr` multiplies the learning rate with the batch size")
    elif size != start:
        print(f"note     the config's learning rate is meant for {start} per rank, and stays as it is")
    print(f"written  {file}")
