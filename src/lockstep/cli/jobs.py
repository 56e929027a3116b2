"""`lockstep train`, `test` and `predict`, and what all commands that run a config share (`Job`).

They run it in this process, in the ranks that a launcher has started, or in ranks that are started here.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn, TypeAlias

import typer

from lockstep.cli.config import apply_options, read_config
from lockstep.cli.options import (
    CfgOptions,
    ConfigPath,
    LaunchOptions,
    RankOptions,
    TrustConfig,
    rank_option,
)
from lockstep.config import Config
from lockstep.errors import Preempted, TopologyError
from lockstep.launch import JobSpec, launch
from lockstep.launch.job import SENT_SIGNALS
from lockstep.launch.notices import loading_torch, say
from lockstep.location import locate, make_folder, require_disk
from lockstep.output import require_shown
from lockstep.topology import LauncherName, infer_launcher, read_topology

if TYPE_CHECKING:
    from lockstep.runner import Runner

Mode: TypeAlias = Literal["train", "val", "test"]


def _strategies(incomplete: str) -> list[str]:
    """Return the names that a shell may complete, without importing torch; a config may register others."""
    return [name for name in ("single", "ddp", "fsdp", "deepspeed", "colossalai") if name.startswith(incomplete)]


@dataclass(frozen=True, kw_only=True)
class Job(RankOptions, ABC):
    """Base class of commands that run a config: the config, the changes to it, and the ranks that run it."""

    config: ConfigPath
    strategy: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            autocompletion=_strategies,
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
        LauncherName | None,
        rank_option(
            help="The launcher whose ranks to join. Default: detected from the environment; none starts new ranks.",
        ),
    ] = None

    @abstractmethod
    def complete(self, cfg: Config) -> None:
        """Set the config keys that are specific to this command."""

    def mode(self, cfg: Config) -> Mode:
        """Return the mode of the run: here "train"."""
        return "train"

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
            require_shown()

    def run(self) -> None:
        """Run the config in this process, or in ranks that are started here."""
        spec, max_restarts = self.job_spec(), getattr(self, "max_restarts", 0)
        launcher = self.launcher or infer_launcher(os.environ)
        is_alone = spec.nproc == 1 and spec.nnodes == 1 and max_restarts == 0 and getattr(self, "numa", None) is None
        here = launcher != "none" or is_alone
        if launcher != "none":
            check_ranks_found(launcher, self)
        loading = "loading torch" if here else f"loading torch to {'check' if self.check else 'read'} {self.config}"
        with _stops_before_it_begins() if isinstance(self, Train) else nullcontext():
            with loading_torch(loading if launcher == "none" else None):
                cfg = self.read()
                import torch  # noqa: F401  # needed by all that follows; the config may not have imported it
            cfg.launcher = launcher
            if self.check:
                from lockstep.lint import check_config  # imports torch

                check_config(cfg, needed=("model", f"{self.mode(cfg)}_dataloader"))
            if not here:
                _start_ranks(self, cfg, spec)
        if here:
            self.execute(cfg)


@dataclass(frozen=True, kw_only=True)
class Train(LaunchOptions, Job):
    """Train what CONFIG describes.

    It runs in this process; in --nproc ranks that are started here; or, under torchrun, mpirun or srun, in their ranks.
    """

    resume: Annotated[bool, typer.Option("--resume", help="Resume from the last checkpoint in the work dir.")] = False

    def complete(self, cfg: Config) -> None:
        """Set whether to resume."""
        cfg.resume = self.resume or cfg.get("resume") or False


@contextmanager
def _stops_before_it_begins() -> Iterator[None]:
    """End the process with code 75 at a signal that asks it to stop, in the block."""

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        say(
            f"{signal.Signals(number).name} came while no training was under way, so that there is nothing to save. "
            f"Start it again (exit code {Preempted.EXIT_CODE})"
        )
        os._exit(Preempted.EXIT_CODE)  # an exception in the midst of loading torch would be lost

    # Whoever has started this process may have let it ignore one.
    numbers = [one for one in SENT_SIGNALS if signal.getsignal(one) is signal.SIG_DFL]
    for number in numbers:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number in numbers:
            if signal.getsignal(number) is stop:  # else the config, or what it imports, has set one of its own
                signal.signal(number, signal.SIG_DFL)


def ignore_stop_signals() -> None:
    """Let a process that has done its work end as usual: a signal that comes now would make it look as if it failed."""
    for number in (signal.SIGINT, *SENT_SIGNALS):
        signal.signal(number, signal.SIG_IGN)


@dataclass(frozen=True, kw_only=True)
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
            from lockstep.runner.resume_from import find_best

            place = find_best(RunnerArguments(**RunnerArguments.keywords_of(cfg)))
        else:
            from lockstep.weights import check_weights  # imports torch

            check_weights(place := locate(self.checkpoint), "`--checkpoint`")
        cfg.update(load_from=str(place.resolve() if isinstance(place, Path) else place), resume=False)

    def mode(self, cfg: Config) -> Mode:
        """Return "val" if the config has validation data but no test data, otherwise "test"."""
        return "val" if cfg.get("test_dataloader") is None and cfg.get("val_dataloader") is not None else "test"


@dataclass(frozen=True, kw_only=True)
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

    def __post_init__(self) -> None:
        object.__setattr__(self, "out", self.out.expanduser())  # a shell leaves the ~ of --out=~/file as it is

    def complete(self, cfg: Config) -> None:
        """Set the weights to load, and make the folder of a file, which is written at the end."""
        Test.complete(self, cfg)
        if self._is_file:
            make_folder(self.out.parent, "--out")

    @property
    def _is_file(self) -> bool:
        return self.out.suffix in (".pt", ".pth")

    def execute(self, cfg: Config) -> None:
        """Predict, and write it down."""
        import torch

        from lockstep.dist import run_on_main
        from lockstep.runner import Runner

        runner = Runner.from_cfg(cfg)
        loader = getattr(runner.args, f"{self.mode(cfg)}_dataloader")
        found = runner.predict(loader, out_dir=None if self._is_file else self.out)
        if self._is_file:
            run_on_main(lambda: torch.save(found, self.out))
        if runner.rank == 0:
            runner.console.print(f"written {self.out}", markup=False, soft_wrap=True)


def _start_ranks(job: Job, cfg: Config, spec: JobSpec) -> None:
    """Start ranks that run a config, and return when they have ended."""
    from lockstep.runner import Runner  # imports torch

    Runner.from_cfg(cfg)  # builds nothing, but raises on invalid arguments
    log_dir = Path(cfg.work_dir) / "ranks"
    make_folder(log_dir, "work_dir")
    request = {"argv": sys.argv, "job": type(job).__name__, "options": asdict(job)}
    payload = json.dumps(request, default=str)  # paths become strings
    command = ["-m", "lockstep.cli.rank"]
    launch(command, spec, log_dir=log_dir, payload=payload, trains=isinstance(job, Train), **job.of_launch())


def default_work_dir(config: Path) -> Path:
    """Return ``work_dirs/NAME``: the name of the config file, or of its folder if the file is called `config`."""
    path = Path(os.path.realpath(config))
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
        ("--max-restarts", getattr(options, "max_restarts", None) or None, 0),
        ("--numa", getattr(options, "numa", None), None),
    ):
        if wanted is not None and wanted != found:
            fits = "not be given" if found is None else f"be {found}"
            raise TopologyError(
                f"`{option}` must {fits}, as of the ranks found in the environment ({launcher}), but is {wanted}. "
                "Leave it out to join them, or give --launcher none to start others"
            )
    if topology.rank == 0:
        say(f"joining the ranks found ({launcher}): {topology.world_size}")
        of_starting = ("rdzv", "node_rank", "rdzv_timeout", "grace_seconds")
        defaults = {field.name: field.default for field in fields(LaunchOptions) if field.name in of_starting}
        given = [name for name, default in defaults.items() if getattr(options, name, default) != default]
        if given:
            names = ", ".join(f"--{name.replace('_', '-')}" for name in given)
            say(f"no effect of {names} on ranks that are started already: give such options to their launcher")


def _print_table(mode: Literal["val", "test"], metrics: Mapping[str, Any], runner: Runner) -> None:
    from rich.table import Table
    from rich.text import Text

    data = {"test": "test data", "val": "validation data"}[mode]
    units = getattr(runner, f"{mode}_loop").units
    table = Table("metric", data, title=Text(str(runner.args.load_from)), title_justify="left")
    for name, value in metrics.items():
        number = f"{value:.6g}" if isinstance(value, float) else str(value)
        table.add_row(Text(name), Text(f"{number} {units.get(name, '')}".rstrip()))
    runner.console.print(table)
