"""`lockstep find-batch-size`: try batch sizes for a config, each in ranks that are started for it."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lockstep.cli.jobs import Job
from lockstep.cli.options import whole_number
from lockstep.config import Config
from lockstep.errors import TopologyError, counted
from lockstep.launch.notices import loading_torch
from lockstep.topology import infer_launcher

if TYPE_CHECKING:
    from lockstep.runner import Runner
    from lockstep.runner.batch_size_finder import BatchSizeSearch, Trial


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
    updates: Annotated[int, whole_number(2, help="Updates of the model with each size.")] = 3
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
        ranks = TrialRanks(_OfJob(asdict(self)), nproc, self.updates, memory, _print_trial)
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
class _OfJob:
    """Makes the Runner for a batch size in a rank, which reads the config itself."""

    options: dict[str, Any]

    def __call__(self, batch_size: int) -> Runner:
        from lockstep.runner.batch_size_finder import OfConfig

        return OfConfig(FindBatchSize(**self.options).read())(batch_size)


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
