"""The start of a run: joining the other ranks, finding what to resume from, and creating its folder."""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any, cast

import torch

from lockstep.calls import short_path
from lockstep.device import get_device
from lockstep.dist import (
    get_backend,
    get_dist_info,
    infer_launcher,
    init_dist,
    is_distributed,
    is_main_process,
    run_on_main,
)
from lockstep.dist.agreement import differing
from lockstep.dist.world import allow_files
from lockstep.errors import ConfigError, DistError, TopologyError, require_known, require_one_of
from lockstep.launch.worker import note_run
from lockstep.location import Location, make_folder
from lockstep.logging import JsonLinesSink, MessageHub, open_console, run_logging, warnings_once
from lockstep.masking import secrets_in
from lockstep.registry import in_default_scope
from lockstep.registry.signatures import Arguments
from lockstep.runner import resume_from
from lockstep.runner.arguments import MATMUL_PRECISIONS, RunnerArguments, checked_keys
from lockstep.runner.data_workers import refuse_script_imported_by_worker
from lockstep.runner.description import save_config
from lockstep.runner.options import first_difference
from lockstep.runner.preemption import stopping_at
from lockstep.runner.run import TrainRun, Workspace
from lockstep.runner.seeds import set_randomness
from lockstep.topology import LauncherName, read_topology
from lockstep.weights import Weights

_RUNNING = ".running"  # in the folder of a run whose training goes on
_logger = logging.getLogger(__name__)


def open_workspace(
    args: RunnerArguments,
    load_from: Weights | None,
    message_hub: MessageHub,
    hooks: Iterable[Any] = (),
    *,
    trains: bool,
) -> Workspace:
    """Join the other ranks, find the checkpoint to resume from, seed, and create the run's folder.

    The `hooks` are those that were registered.

    **Collective**: every rank of the job.
    """
    join_ranks(args.launcher, args.env_cfg)
    _check_same_arguments(args)
    rank, world_size = get_dist_info()
    folders = resume_from.checkpoint_folders(args, hooks)
    if trains:
        resume_from.check_writable(folders)
    resume_from.clear_drafts(folders if trains else folders[:1])  # first of all: they may fill the disk
    stored, skipped = None, list[str]()
    if trains or args.resume:
        stored, skipped = resume_from.find_resumption(load_from, folders, asked=args.resume, beginning=args.beginning)
    work_dir = Path(args.work_dir)
    run_dir = make_run_dir(work_dir, args.experiment_name, folders[1:] if trains else ())
    if trains:
        note_run(run_dir.name)
        if None in resume_from.out_dirs(args, hooks):
            resume_from.check_shared(run_dir)
    seed = set_randomness(resume_from.randomness_of(args.randomness, stored))
    run_on_main(lambda: save_config(args.cfg, run_dir))
    return Workspace(
        args=args,
        cfg=args.cfg,
        work_dir=work_dir,
        rank=rank,
        world_size=world_size,
        seed=seed,
        run_dir=run_dir,
        checkpoint_dir=folders[1] / run_dir.name if folders[1:] else run_dir,
        stored=stored,
        skipped=skipped,
        console=open_console(prints=rank == 0),
        records=JsonLinesSink(run_dir / "metrics.jsonl", has_times=True),
        message_hub=message_hub,
        trains=trains,
    )


def _check_same_arguments(args: RunnerArguments) -> None:
    """Compare what all ranks decide alike before they train, such as the order of the samples.

    **Collective**: every rank. **Cost**: one exchange between the hosts.

    Raises:
        ConfigError: on every rank, naming the argument and its values.
    """
    own = {f"randomness[{key!r}]": repr(value) for key, value in (args.randomness or {}).items()}
    own |= {"resume": repr(bool(args.resume)), "load_from": repr(args.load_from is not None)}
    own["resume_options"] = repr(args.resume_options)
    if (by_rank := differing(own)) is None:
        return
    name, values = first_difference(by_rank)
    given = "is given on some ranks alone" if name == "load_from" else f"is {values}"
    raise ConfigError(
        f"`{name}` must be the same on all ranks, but {given}. Set it in the same way on every rank"
        + (", or leave it out: rank 0 draws one for all" if "seed" in name else "")
    )


def _warn_of_other_values(args: RunnerArguments) -> None:
    """Warn of what ranks may have in different ways, but seldom are meant to. **Collective**: every rank."""
    loader = args.train_dataloader
    size = loader.get("batch_size") if isinstance(loader, Mapping) else getattr(loader, "batch_size", None)
    by_rank = differing({"work_dir": repr(str(args.work_dir)), "batch_size": repr(size)})
    if by_rank is not None:
        name, values = first_difference(by_rank)
        says = "all ranks use that of rank 0" if name == "work_dir" else "each rank takes batches of its own size"
        _logger.warning("`%s` is not the same on all ranks: %s; %s", name, values, says)


def let_train(space: Workspace, load_from: Weights | None, hooks: Iterable[Any] = ()) -> None:
    """Do what a training needs in addition in a workspace that an evaluation has opened.

    **Collective**: every rank of the job.
    """
    args, folders = space.args, resume_from.checkpoint_folders(space.args, hooks)
    resume_from.check_writable(folders)
    resume_from.clear_drafts(folders[1:])
    if not args.resume:  # else it has been looked for
        space.stored, space.skipped = resume_from.find_resumption(load_from, folders, asked=False)
        if space.stored is not None:
            space.seed = set_randomness(resume_from.randomness_of(args.randomness, space.stored))
    note_run(space.run_dir.name)
    space.trains = True


@contextmanager
def logging_to_folder(space: Workspace) -> Iterator[None]:
    """Log to the console and to the run's folder, and look up names in the scope that the config says."""
    args = space.args
    # The other ranks write only what rank 0 may not have seen.
    file, file_level = ("log.txt", "DEBUG") if space.rank == 0 else (f"log_rank{space.rank}.txt", "WARNING")
    secrets = secrets_in(space.cfg) | secrets_in(os.environ)
    with (
        in_default_scope(args.default_scope),
        warnings_once(shows_distributed=space.rank == 0),
        run_logging(space.console, space.run_dir / file, level=args.log_level, file_level=file_level, secrets=secrets),
    ):
        ranks = f"{space.world_size} ranks" if space.world_size > 1 else "1 rank"
        over = f" over {get_backend()}" if space.world_size > 1 else ""
        _logger.info("%s on %s%s, seed %d, folder %s", ranks, get_device(), over, space.seed, short_path(space.run_dir))
        _warn_of_other_values(args)
        for key, meant in args.misspelt.items():
            _logger.warning("the config's key `%s` means nothing here: did you mean `%s`?", key, meant)
        yield


def dist_arguments() -> set[str]:
    """Return what `env_cfg.dist_cfg` may hold."""
    return {*Arguments.of(init_dist).named, *Arguments.of(torch.distributed.init_process_group).named}


def join_ranks(launcher: str | None, env_cfg: Mapping[str, Any] | None) -> None:
    """Make sure that the ranks of this job form a group, if there are several.

    Args:
        launcher: what started the ranks; None infers it from the environment.
        env_cfg: `dist_cfg`, with arguments of `init_dist`: its backend nccl, common in configs for GPUs, is replaced by
            the default one if there is no GPU; `cudnn_benchmark`; `float32_matmul_precision`, as for
            `torch.set_float32_matmul_precision`; `mp_cfg`, in which only `mp_start_method` has an
            effect; `resource_limit`, the number of files that may be open at once.
    """
    refuse_script_imported_by_worker()
    options = checked_keys("env_cfg", env_cfg)
    arguments = dict(options.get("dist_cfg") or {})
    require_known("env_cfg.dist_cfg", arguments, dist_arguments())  # also where no group is made
    if "cudnn_benchmark" in options:
        torch.backends.cudnn.benchmark = bool(options["cudnn_benchmark"])
    if (precision := options.get("float32_matmul_precision")) is not None:
        require_one_of("env_cfg.float32_matmul_precision", precision, MATMUL_PRECISIONS)
        torch.set_float32_matmul_precision(precision)
    multiprocessing = options.get("mp_cfg") or {}
    require_known("env_cfg.mp_cfg", multiprocessing, {"mp_start_method", "opencv_num_threads"})
    start_method = multiprocessing.get("mp_start_method")
    if start_method is not None:
        torch.multiprocessing.set_start_method(start_method, force=True)
    if options.get("resource_limit") is not None:
        allow_files(int(options["resource_limit"]))
    if is_distributed():
        return
    found = infer_launcher()
    launcher = launcher or found
    if launcher == "none":
        if found != "none":
            _warn_of_lone_ranks(found)
        elif (tasks := os.environ.get("SLURM_NTASKS", "1")) != "1" and "SLURM_PTY_PORT" not in os.environ:
            _logger.warning(
                "Slurm has given this job %s tasks, but srun has not started this process: it trains alone, on all "
                "data. To train on all tasks, put srun before the command",
                tasks,
            )
        return
    lacks_gpu = arguments.get("backend") == "nccl" and not torch.cuda.is_available()
    if lacks_gpu:
        del arguments["backend"]
    init_dist(cast(LauncherName, launcher), **arguments)  # which it checks
    if lacks_gpu and is_main_process():
        _logger.warning("`env_cfg.dist_cfg.backend` is nccl, which needs a GPU, and there is none: it is left out")


def _warn_of_lone_ranks(found: LauncherName) -> None:
    """Warn if `launcher="none"` lets each of several ranks that a launcher has started train by itself."""
    with suppress(TopologyError):
        topology = read_topology(os.environ, found)
        if topology.world_size > 1:
            _logger.warning(
                "launcher='none' lets this process train alone, on all data, though it was started as rank %d of %d; "
                "so do the others. To train together, give launcher=%r, in a script for MMEngine --launcher %s",
                topology.rank, topology.world_size, found, found,
            )  # fmt: skip


def make_run_dir(work_dir: Path, experiment_name: str | None, others: Sequence[Location] = ()) -> Path:
    """Create a new folder for this run, named after the time, and return it on every rank.

    Args:
        work_dir: where it is created.
        experiment_name: begins its name.
        others: places of checkpoints, in which there must be no folder of that name either: a run on another machine
            may have begun within the same second.

    **Collective**: every rank; rank 0 creates the folder.

    Raises:
        ConfigError: the folder cannot be created; PeerError on the other ranks.
    """
    prefix = "" if experiment_name is None else f"{experiment_name}_"

    def make() -> Path:
        name = f"{prefix}{datetime.now():%Y%m%d_%H%M%S}"
        for attempt in range(1000):  # two runs may begin within one second
            folder = work_dir / (name if attempt == 0 else f"{name}_{attempt}")
            if not any((other / folder.name).exists() for other in others):
                with suppress(FileExistsError):
                    make_folder(folder, "work_dir", anew=True)
                    return folder
        raise FileExistsError(f"{work_dir / name} and a thousand like it exist already")

    return run_on_main(make)


@contextmanager
def told_of_others(space: Workspace) -> Iterator[None]:
    """Warn if another training goes on in the work_dir, and let one that begins later see this one.

    Rank 0 does this alone: it locks a file in the run's folder, which the system unlocks when the process ends.
    """
    if space.rank != 0:
        yield
        return
    mark = space.run_dir / _RUNNING
    with mark.open("wb") as own:
        with suppress(OSError):  # there are no locks where the file is
            fcntl.flock(own, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for other in sorted(space.work_dir.glob(f"*/{_RUNNING}")):
            if other != mark and _is_locked(other):
                _logger.warning(
                    "another training goes on in this work_dir: that of %s, or processes that it has left. With "
                    "resume=True, each goes on from the checkpoint that either has saved last. Give one of them "
                    "another work_dir, or end it",
                    other.parent,
                )
        try:
            yield
        finally:
            with suppress(OSError):  # where the folder can't be written to any more, which is not to hide another error
                mark.unlink(missing_ok=True)


def _is_locked(path: Path) -> bool:
    """Return whether another process has locked a file; False where that can't be known."""
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return isinstance(error, BlockingIOError)
    return False


@contextmanager
def stoppable(run: TrainRun) -> Iterator[None]:
    """Let signals, and a save that fails in the background, stop a training.

    **Collective**: every rank. **Cost**: two threads that sleep, and a connection to the store.

    Raises:
        ConfigError: `stop_signals` names a signal that does not exist.
    """
    with ExitStack() as opened:
        try:
            opened.enter_context(run.agreement.opened())
        except DistError as error:
            _logger.warning(
                "%s. `stop_signals` end them at once, without a checkpoint, and `async_save` has no effect. Start them "
                "with `lockstep launch` or torchrun",
                error,
            )
        opened.enter_context(stopping_at(run.args.stop_signals, run.agreement))
        yield
