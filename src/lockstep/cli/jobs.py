"""`lockstep train`, `test`, `predict`, `find-lr` and `find-batch-size`: commands that run a config.

They run it in this process, in the ranks that a launcher has started, or in ranks that are started here.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn, TypeAlias

import typer

from lockstep.cli.config import apply_options, import_from_folder_of, read_config
from lockstep.cli.options import (
    CfgOptions,
    ConfigPath,
    GraceSeconds,
    MaxRestarts,
    Numa,
    RankOptions,
    TrustConfig,
    completing,
    rank_option,
    whole_number,
)
from lockstep.config import Config, ResolvedConfig
from lockstep.errors import ConfigError, Preempted, TopologyError, counted
from lockstep.launch import JobSpec, launch
from lockstep.launch.notices import loading_torch, say
from lockstep.location import require_disk
from lockstep.report import read_run, write_page
from lockstep.topology import infer_launcher, read_topology

if TYPE_CHECKING:
    from lockstep.runner import Runner
    from lockstep.runner.batch_size_finder import BatchSizeSearch, Trial
    from lockstep.runner.lr_finder import LRSearch

Mode: TypeAlias = Literal["train", "val", "test"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job(RankOptions, ABC):
    """Base class of commands that run a config: the config, the changes to it, and the ranks that run it."""

    config: ConfigPath
    strategy: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            # Known without importing torch; a config may register others.
            autocompletion=completing("single", "ddp", "fsdp", "deepspeed", "colossalai"),
            help="How the model is distributed: single, ddp, fsdp, deepspeed, colossalai or your own; "
            "overrides the config.",
        ),
    ] = None
    cfg_options: CfgOptions = None
    work_dir: Annotated[
        Path | None, typer.Option(help="Folder of the run. Default: the config's, else work_dirs/NAME.")
    ] = None
    check: Annotated[
        bool, typer.Option("--check/--no-check", help="Look for errors in the whole config before anything is started.")
    ] = True
    trust_config: TrustConfig = False
    launcher: Annotated[
        str | None,
        rank_option(
            metavar="[none|pytorch|slurm|mpi]",
            autocompletion=completing("none", "pytorch", "slurm", "mpi"),
            help="The launcher whose ranks to join. Default: detected from the environment; none starts new ranks.",
        ),
    ] = None

    @abstractmethod
    def complete(self, cfg: Config) -> None:
        """Set the config keys that are specific to this command."""

    def mode(self, cfg: Config) -> Mode:
        """Return the mode of the run: here "train"."""
        return "train"

    def run(self) -> None:
        """Run the command."""
        self.start()

    def read(self) -> Config:
        """Return the config with all changes.

        Raises:
            ConfigError: the config cannot be read, or a change is not valid.
        """
        cfg = read_config(self.config, trusted=self.trust_config)
        if self.strategy is not None:
            cfg.merge_from_dict({"strategy": {"_delete_": True, "type": self.strategy}})
        apply_options(cfg, self.cfg_options or [])
        require_disk(self.work_dir or cfg.get("work_dir") or "", "work_dir")
        cfg.work_dir = os.path.expanduser(self.work_dir or cfg.get("work_dir") or default_work_dir(self.config))
        self.complete(cfg)
        return cfg

    def execute(self, cfg: Config) -> None:
        """Run the config in this process, which is one of several ranks or the only one."""
        from lockstep.runner import Runner  # imports torch

        runner = Runner.from_cfg(cfg)
        mode = self.mode(cfg)
        if mode == "train":
            runner.train()
            return
        metrics = runner.test() if mode == "test" else runner.val()
        if runner.rank == 0:
            _print_table(mode, metrics, runner)

    def start(self, max_restarts: int = 0, grace_seconds: int = 60, numa: str | None = None) -> None:
        """Run the config in this process, or in ranks that are started here."""
        spec = self.job_spec()
        launcher = self.launcher or infer_launcher(os.environ)
        here = launcher != "none" or (spec.nproc == 1 and spec.nnodes == 1 and max_restarts == 0)
        if launcher != "none":
            check_ranks_found(launcher, self)
        loading = "loading torch"
        if not here:
            use = "check" if self.check else "read"
            loading += f" to {use} {self.config}, before starting {counted(spec.nproc, 'rank')}"
        with ExitStack() as early:
            if isinstance(self, Train):
                early.enter_context(_stops_before_it_begins())
            with loading_torch(loading if launcher == "none" else None):
                cfg = self.read()
                import torch  # noqa: F401  # needed by all that follows; the config may not have imported it
            cfg.launcher = launcher
            if self.check:
                from lockstep.lint import check_config  # imports torch

                check_config(cfg, needed=("model", f"{self.mode(cfg)}_dataloader"))
            if not here:
                _start_ranks(self, cfg, spec, max_restarts, grace_seconds, numa)
        if here:
            self.execute(cfg)


@dataclass(frozen=True, slots=True, kw_only=True)
class Train(Job):
    """Train what CONFIG describes.

    It runs in this process; in --nproc ranks that are started here; or, under torchrun, mpirun or srun, in their ranks.
    """

    max_restarts: MaxRestarts = 0
    grace_seconds: GraceSeconds = 60
    numa: Numa = None
    resume: Annotated[bool, typer.Option("--resume", help="Resume from the last checkpoint in the work dir.")] = False

    def complete(self, cfg: Config) -> None:
        """Set whether to resume."""
        cfg.resume = self.resume or cfg.get("resume") or False

    def run(self) -> None:
        """Train."""
        self.start(self.max_restarts, self.grace_seconds, self.numa)


@contextmanager
def _stops_before_it_begins() -> Iterator[None]:
    """End the process with code 75 at a signal that asks it to stop, until the training or its launcher handles it."""

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        say(
            f"{signal.Signals(number).name} came while no training was under way, so that there is nothing to save. "
            f"Start it again (exit code {Preempted.EXIT_CODE})"
        )
        os._exit(Preempted.EXIT_CODE)  # an exception in the midst of loading torch would be lost

    # Whoever has started this process may have let it ignore one.
    numbers = [one for one in (signal.SIGTERM, signal.SIGUSR1) if signal.getsignal(one) is signal.SIG_DFL]
    for number in numbers:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Test(Job):
    """Test the model of a checkpoint on the test data of CONFIG, or on its validation data if it has no test data.

    It runs in this process; in --nproc ranks that are started here; or, under torchrun, mpirun or srun, in their ranks.
    """

    checkpoint: Annotated[
        str,
        typer.Option(
            metavar="PATH",
            help="The model: a checkpoint of a run, a folder or a file of weights, or best for the best one in the "
            "work dir, as kept by save_best.",
        ),
    ]

    def complete(self, cfg: Config) -> None:
        """Set the weights to load."""
        if self.checkpoint == "best" and not Path("best").exists():
            from lockstep.runner.arguments import RunnerArguments  # imports torch
            from lockstep.runner.start import find_best

            cfg.update(load_from=str(find_best(RunnerArguments(**RunnerArguments.keywords_of(cfg)))), resume=False)
            return
        if "://" not in self.checkpoint and not Path(self.checkpoint).exists():  # said without importing torch
            raise ConfigError(
                "`--checkpoint` must be a checkpoint, or a folder or a file of weights, but "
                f"{self.checkpoint} does not exist"
            )
        from lockstep.weights import check_weights, locate  # imports torch

        place = locate(self.checkpoint)
        check_weights(place, "--checkpoint")
        cfg.update(load_from=str(place.resolve() if isinstance(place, Path) else place), resume=False)

    def mode(self, cfg: Config) -> Mode:
        """Return "val" if the config has validation data but no test data, otherwise "test"."""
        return "val" if cfg.get("test_dataloader") is None and cfg.get("val_dataloader") is not None else "test"


@dataclass(frozen=True, slots=True, kw_only=True)
class Predict(Test):
    """Write what the model of a checkpoint predicts for the test data of CONFIG, or for its validation data.

    There is one prediction for each sample, in the order of the dataset. It runs in this process; in --nproc ranks that
    are started here; or, under torchrun, mpirun or srun, in their ranks.
    """

    out: Annotated[
        Path,
        typer.Option(
            metavar="FILE.pt|FOLDER",
            help="A list, for torch.load; or a folder, in which each prediction gets a file of its own.",
        ),
    ]

    def execute(self, cfg: Config) -> None:
        """Predict, and write it down."""
        import torch

        from lockstep.dist import run_on_main
        from lockstep.runner import Runner

        runner, is_file = Runner.from_cfg(cfg), self.out.suffix in (".pt", ".pth")
        loader = getattr(runner.args, f"{self.mode(cfg)}_dataloader")
        found = runner.predict(loader, out_dir=None if is_file else self.out)
        if is_file:
            run_on_main(lambda: torch.save(found, self.out))
        if runner.rank == 0:
            runner.console.print(f"written {self.out}", markup=False, soft_wrap=True)


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


def run_as_rank(request: Mapping[str, Any]) -> None:
    """Run the job for which a command has started this rank."""
    sys.argv = request["argv"]  # the run records what the user typed
    options = request["options"]
    options |= {name: Path(options[name]) for name in ("config", "work_dir", "out") if options.get(name)}
    job = {"Train": Train, "Test": Test, "Predict": Predict, "FindLR": FindLR}[request["job"]](**options)
    import_from_folder_of(job.config)
    cfg = job.read() if request["resolved"] is None else ResolvedConfig(**request["resolved"]).load()
    cfg.launcher = "pytorch"
    job.execute(cfg)


def _start_ranks(job: Job, cfg: Config, spec: JobSpec, max_restarts: int, grace_seconds: int, numa: str | None) -> None:
    """Start ranks that run a config, and return when they have ended."""
    from lockstep.runner import Runner  # imports torch
    from lockstep.runner.start import make_folder

    Runner.from_cfg(cfg)  # builds nothing, but raises on invalid arguments
    log_dir = Path(cfg.work_dir) / "ranks"
    make_folder(log_dir)
    resolved = ResolvedConfig.of(cfg)
    request = {
        "argv": sys.argv,
        "job": type(job).__name__,
        "options": asdict(job),
        "resolved": None if resolved is None else asdict(resolved),
    }
    payload = json.dumps(request, default=str)  # paths become strings
    launch(
        ["-m", "lockstep.cli.rank"],
        spec,
        max_restarts=max_restarts,
        log_dir=log_dir,
        payload=payload,
        grace_seconds=grace_seconds,
        trains=isinstance(job, Train),
        numa=numa,
    )


def default_work_dir(config: Path) -> Path:
    """Return ``work_dirs/NAME``: the name of the config file, or of its folder if the file is called `config`."""
    path = config.resolve()
    return Path("work_dirs") / (path.parent.name if path.stem == "config" else path.stem)


def check_ranks_found(launcher: str, options: RankOptions) -> None:
    """Check that the options agree with the ranks found in the environment.

    Raises:
        TopologyError: they contradict each other.
    """
    topology = read_topology(os.environ, launcher)
    for option, wanted, found in (
        ("--nproc", options.nproc, topology.local_size),
        ("--nnodes", options.nnodes if options.nnodes > 1 else None, topology.num_nodes),
    ):
        if wanted is not None and wanted != found:
            raise TopologyError(
                f"`{option}` must agree with the ranks found in the environment ({launcher}), {found}, but is "
                f"{wanted}. Leave it out to join them, or give --launcher none to start others"
            )
    if topology.rank == 0:
        say(f"joining the ranks found ({launcher}): {topology.world_size}")


def _advice(found: LRSearch, runner: Runner) -> dict[str, str]:
    """Return what a search says of the rate, and how to use it."""
    rate = found.suggestion
    if rate is None:
        return {"rate": f"none: the loss does not fall between {found.lrs[0]:g} and {found.lrs[-1]:g}. See the picture"}
    advice = {"rate": f"{rate:.2g}, where the loss falls most steeply"}
    optim = runner.args.optim_wrapper
    if optim is None and runner.run.strategy.own_optim_wrapper is None:
        advice["use"] = f"--cfg-options optim_wrapper.optimizer.type=AdamW optim_wrapper.optimizer.lr={rate:.2g}"
    elif isinstance(optim, Mapping) and isinstance(optim.get("optimizer"), Mapping):
        advice["use"] = f"--cfg-options optim_wrapper.optimizer.lr={rate:.2g}"
    if len(set(found.factors)) > 1:
        several = ", ".join(f"{rate * factor:.2g}" for factor in dict.fromkeys(found.factors))
        advice["groups"] = f"parameter groups then have the rates {several}"
    if found.still_falls:
        advice["note"] = f"the loss still falls at the highest rate: search on, with --end {10 * found.lrs[-1]:g}"
    return advice


def _print_table(mode: Literal["val", "test"], metrics: Mapping[str, Any], runner: Runner) -> None:
    from rich.table import Table
    from rich.text import Text

    data = {"test": "test data", "val": "validation data"}[mode]
    units = getattr(runner, f"{mode}_evaluator").units
    table = Table("metric", data, title=Text(str(runner.args.load_from)), title_justify="left")
    for name, value in metrics.items():
        number = f"{value:.6g}" if isinstance(value, float) else str(value)
        table.add_row(Text(name), Text(f"{number} {units.get(name, '')}".rstrip()))
    runner.console.print(table)


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
