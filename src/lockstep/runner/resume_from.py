"""Which checkpoint a run resumes from: where they are, which is the newest or best, and what is wrong with others."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from lockstep.checkpoint import remove_dead_drafts
from lockstep.checkpoint.files import DAMAGED, is_there
from lockstep.checkpoint.loading import Stored, open_checkpoint
from lockstep.checkpoint.search import candidates, readable_manifest, written_at
from lockstep.checkpoint.together import on_all
from lockstep.checkpoint.verifying import check_files, check_resumable
from lockstep.dist import all_gather_object, get_rank, is_main_process, run_on_main
from lockstep.errors import CheckpointError, ConfigError
from lockstep.groups import this_rank
from lockstep.launch.worker import RESUME_SINCE, noted_runs
from lockstep.location import Location, RemotePath, absolute, locate
from lockstep.registry import HOOKS, in_default_scope
from lockstep.registry.registry import SCOPE
from lockstep.runner.arguments import RunnerArguments
from lockstep.runner.build import default_hooks
from lockstep.runner.run import Run, TrainRun
from lockstep.watch.board import pauses
from lockstep.weights import Weights, best_checkpoint_in, check_weights, find_checkpoint

_SECONDS_TO_SEE = 60.0  # what another host has just made: NFS looks again after 30 seconds at the latest, by default
_LONGEST_PAUSE = 0.25
_SEARCHES = 3  # at most, while other runs remove what is found
_logger = logging.getLogger(__name__)


def checkpoint_folders(args: RunnerArguments, hooks: Iterable[Any] = ()) -> list[Location]:
    """Return the work_dir, and the folders outside of it, some in a bucket, in which hooks write checkpoints.

    Args:
        args: the arguments of the Runner.
        hooks: hooks, and configs of hooks, besides those of the arguments.
    """
    work_dir = Path(args.work_dir)
    elsewhere = [one for one in out_dirs(args, hooks) if one is not None]
    return list(dict.fromkeys([work_dir, *(absolute(locate(one)) / work_dir.name for one in elsewhere)]))


def out_dirs(args: RunnerArguments, hooks: Iterable[Any] = ()) -> list[Any]:
    """Return the `out_dir` of each hook that writes checkpoints; None for the run's folder in the work_dir."""
    found = list[Any]()
    for hook in [*default_hooks(args.default_hooks), *(args.custom_hooks or ()), *hooks]:
        is_config = isinstance(hook, Mapping)
        kind = hook.get("type") if is_config else type(hook)
        if isinstance(kind, str):
            with in_default_scope((is_config and hook.get(SCOPE)) or args.default_scope):
                kind = HOOKS.get(kind)
        if getattr(kind, "writes_checkpoints", False):
            found.append(hook.get("out_dir", getattr(kind, "out_dir", None)) if is_config else hook.out_dir)
    return found


def best_checkpoint(args: RunnerArguments, hooks: Iterable[Any], run: Run | None) -> Location | None:
    """Return the best checkpoint of a run's training, or else of the last one in the work_dir that has kept one.

    Another job may train in the same work_dir. The `hooks` were registered.
    """
    own = [run.checkpoint_dir, run.run_dir] if isinstance(run, TrainRun) else []
    return best_checkpoint_in(own) or best_checkpoint_in(checkpoint_folders(args, hooks))


def find_best(args: RunnerArguments, hooks: Iterable[Any] = (), run: Run | None = None) -> Location:
    """Return what `best_checkpoint` returns.

    Raises:
        ConfigError: there is none.
    """
    best = best_checkpoint(args, hooks, run)
    if best is None:
        raise ConfigError(
            f"`checkpoint` must be 'best' only where a run has kept its best one, but none in {args.work_dir} has. "
            "Train with default_hooks=dict(checkpoint=dict(save_best='accuracy')), or another metric"
        )
    return best


def check_writable(folders: Sequence[Location]) -> None:
    """Write to those of these folders that are in a bucket, so that a fault is not found only by the first save.

    **Collective**: every rank; each writes an empty object, and removes it.

    Raises:
        ConfigError: on every rank, if some rank can't write.
    """
    for folder in folders:
        if isinstance(folder, RemotePath):
            on_all(f"{folder} could not be written to", partial(_try_to_write, folder))


def _try_to_write(folder: RemotePath) -> None:
    probe = folder / f".written_by_rank_{get_rank()}"
    try:
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        raise ConfigError(
            f"`out_dir` of CheckpointHook must be writable, but {error}. Check that the bucket exists, and that each "
            "rank has credentials to write to it and to remove from it"
        ) from error


def check_shared(run_dir: Path) -> None:
    """Look for the run's folder on every rank, as each is to write its part of a checkpoint there.

    **Collective**: every rank.

    Raises:
        ConfigError: on every rank, if some rank does not find it: it is on a disk of another host's own.
    """
    place = Path(run_on_main(lambda: os.path.abspath(run_dir)))

    def look() -> None:
        if not any(_is_seen(place) for _ in pauses(_SECONDS_TO_SEE, _LONGEST_PAUSE)):
            raise ConfigError(
                f"`work_dir` must be on a disk that all ranks share, since each writes its part of a checkpoint, but "
                f"{this_rank()} does not find {place}, which rank 0 has made. Choose another folder, a bucket as "
                "`out_dir` of CheckpointHook, or save none, by default_hooks=dict(checkpoint=None)"
            )

    on_all(f"checkpoints could not be saved in {place}", look)


def _is_seen(place: Path) -> bool:
    for folder in (place.parent.parent, place.parent):
        with suppress(OSError):
            os.listdir(folder)  # lets a client of a network's disk ask its server anew
    return place.is_dir()


def clear_drafts(folders: Sequence[Location]) -> None:
    """Remove what saves have left in these folders that were interrupted by the end of their process.

    **Collective**: every rank; rank 0 removes.
    """
    for draft in run_on_main(partial(remove_dead_drafts, folders)):
        _logger.info("removed %s, which an interrupted save had left", draft)


def find_resumption(
    load_from: Weights | None, folders: Sequence[Location], *, asked: bool = True, beginning: str | None = None
) -> tuple[Stored | None, list[str]]:
    """Return the checkpoint to resume from, open, and what is wrong with those that would have come before it.

    In ranks that were restarted it is the last one that this job has saved, asked for or not. Else, if asked for, it is
    the last one of the work_dir, or the newest one that is whole. With `load_from` it is the newest one of a training
    that began there, because a job that was stopped is started by the same command again; if there is none, it is
    `load_from` itself, unless that has weights alone. Its bytes are compared with their checksums when they are read.

    Args:
        load_from: where the training begins.
        folders: the work_dir, and further folders that hold its checkpoints.
        asked: whether the user wants to resume.
        beginning: `load_from`, as checkpoints of a training that began there say it.

    **Collective**: every rank; rank 0 looks.

    Raises:
        CheckpointError: on every rank, if `load_from` is not a checkpoint, or if there are some and none is whole.
    """
    began = os.environ.get(RESUME_SINCE)
    if began is not None:
        found, faults = newest(folders, since=float(began))
        if found is None and faults and (load_from is not None or not asked):
            # The user wants another beginning than a checkpoint of this job, so that nothing else would speak of these.
            raise _none_is_whole("ranks that start again must find a whole checkpoint of their job", folders, faults)
        if found is not None:
            return found, faults
    if not asked:
        return None, []
    if load_from is not None:
        found, faults = (None, list[str]()) if beginning is None else newest(folders, beginning=beginning)
        return (found, faults) if found is not None else (_beginning_at(load_from), faults)
    found, faults = newest(folders)
    if found is None and faults:
        raise _none_is_whole("resume=True must find a whole checkpoint", folders, faults)
    return found, faults


def _beginning_at(load_from: Weights) -> Stored | None:
    """Return the checkpoint at which a training begins, open; None if there are weights alone."""
    found = None
    directory, fault = run_on_main(partial(_checkpoint_at, load_from.path))
    if directory is not None:
        found, fault = _opened(directory)
    if fault is not None:
        raise CheckpointError(fault)
    return found


def _checkpoint_at(path: Location) -> tuple[Location | None, str | None]:
    """Return the checkpoint that a path means; None where it does not, with what is wrong if there are no weights."""
    try:
        if (found := find_checkpoint(path)) is None:
            check_weights(path, "`load_from`")
    except ConfigError as error:
        return None, str(error)
    return found, None


def _none_is_whole(wanted: str, folders: Sequence[Location], faults: Sequence[str]) -> CheckpointError:
    return CheckpointError(
        f"{wanted} in {' or '.join(map(str, folders))}, but none of those there is: "
        f"{' / '.join(fault.removesuffix(f'. {DAMAGED}') for fault in faults)}. Copy one of them again, or start "
        "a new job without resume"
    )


def newest(
    folders: Sequence[Location],
    *,
    since: float = 0.0,
    beginning: str | None = None,
    without: Collection[Location] = (),
) -> tuple[Stored | None, list[str]]:
    """Return the last whole checkpoint, and the faults of later ones. **Collective**: every rank; rank 0 looks.

    Args:
        folders: where to look.
        since: look only at those of this job, which began then.
        beginning: look only at those of trainings that began there.
        without: leave these out.
    """
    for _ in range(_SEARCHES):
        passed: dict[Location, str] = {}
        search = (
            (directory, fault)
            for directory, fault in candidates(folders[0], folders[1:])
            if directory not in without
            and (since == 0.0 or is_of_this_job(directory, since))
            and (beginning is None or _began_at(directory, beginning))
        )
        while (candidate := run_on_main(partial(next, search, None))) is not None:
            directory, fault = candidate
            found, fault = _opened(directory) if fault is None else (None, fault)
            if fault is None:
                return found, list(passed.values())
            passed[directory] = fault
        if run_on_main(partial(all, map(is_there, [*passed]))):
            break  # else another run has removed one, and written a newer one before
    return None, list(passed.values())


def is_of_this_job(directory: Location, since: float) -> bool:
    """Return whether ranks of this job have saved a checkpoint, as far as this node knows their runs; else by its time.

    Another job may save in the same work_dir.
    """
    runs = noted_runs()
    return directory.parent.name in runs if runs else written_at(directory) >= since


def _began_at(directory: Location, beginning: str) -> bool:
    """Return whether a checkpoint is of a training that began there, or may be, because its manifest is damaged."""
    manifest = readable_manifest(directory)
    return manifest is None or manifest.meta.get("load_from") == beginning


def _opened(directory: Location) -> tuple[Stored | None, str | None]:
    """Return a checkpoint whose files are there in their sizes, or what is wrong, the same on every rank.

    **Collective**: every rank; each reads the manifest. Rank 0 looks at each file.
    """
    stored, fault = None, None
    try:
        stored = open_checkpoint(directory)
        if is_main_process():
            check_files(directory, stored.manifest)
            check_resumable(directory, stored.manifest)
    except (ConfigError, OSError) as error:
        fault = str(error)
    fault = next((one for one in all_gather_object(fault) if one is not None), None)
    return (stored, None) if fault is None else (None, fault)


def randomness_of(randomness: Mapping[str, Any] | None, resumed: Stored | None) -> Mapping[str, Any] | None:
    """Return the given randomness; if it has no seed, with the seed of the run that is resumed."""
    if resumed is None or (randomness or {}).get("seed") is not None:
        return randomness
    return {**(randomness or {}), "seed": resumed.meta["seed"]}
