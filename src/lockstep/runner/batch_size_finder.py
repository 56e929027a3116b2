"""The search for the largest batch size that fits into memory, each size tried by fresh ranks.

A rank that runs out of memory leaves the others waiting inside a collective, and may leave its allocator fragmented. So
a size is tried in processes of its own: if one of them fails, the agent that has started them ends the others.
"""

from __future__ import annotations

import json
import multiprocessing.spawn
import os
import pickle
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from lockstep.config import Config
from lockstep.device import get_device
from lockstep.errors import ConfigError, LaunchError, TopologyError, counted, message_of, require_count
from lockstep.launch import JobSpec, launch
from lockstep.runner.runner import Runner
from lockstep.topology import infer_launcher

MakeRunner: TypeAlias = Callable[[int], Runner]
Outcome: TypeAlias = Literal["fits", "out of memory", "too few samples"]

TRIAL_FOLDER = "LOCKSTEP_TRIES_BATCH_SIZE"  # variable of the ranks of a trial: the folder of its files
_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class Trial:
    """One size that was tried.

    Attributes:
        batch_size: samples in a batch of each rank.
        outcome: whether it fits.
        memory_mib: peak memory of the rank that needed most; None if it does not fit.
        samples_per_second: of all ranks, in the last update; None if it does not fit.
        message: the message of the rank that ran out of memory.
    """

    batch_size: int
    outcome: Outcome
    memory_mib: float | None = None
    samples_per_second: float | None = None
    message: str = ""


@dataclass(frozen=True, slots=True)
class BatchSizeSearch:
    """What a search for a batch size has found.

    Attributes:
        batch_size: the largest size that fits, for each rank.
        ended_by: what ended the search: memory; the limit `max_batch_size`; or the number of samples.
        trials: the sizes in the order in which they were tried.
        nproc: number of ranks.
    """

    batch_size: int
    ended_by: Literal["memory", "limit", "samples"]
    trials: list[Trial]
    nproc: int


def find_batch_size(
    make_runner: MakeRunner | Mapping[str, Any],
    *,
    nproc: int = 1,
    start: int | None = None,
    max_batch_size: int | None = None,
    bisect: bool = False,
    updates: int = 3,
    memory: int | None = None,
    on_trial: Callable[[Trial], None] | None = None,
) -> BatchSizeSearch:
    """Search the largest batch size per rank with which training fits into memory, by doubling it.

    Each size is tried by `nproc` ranks that are started for it, under the strategy of the run, by some updates of its
    real training without hooks; they then end. If one of them runs out of memory, the size does not fit. Nothing is
    saved, and learning rates are not changed: whether to scale them with the batch is up to the user (`auto_scale_lr`).

    Args:
        make_runner: a function of a module that returns the Runner for a batch size; it is called in each rank. Or a
            config, whose `train_dataloader.batch_size` is searched.
        nproc: number of ranks, all on this machine.
        start: the first size; by default that of the config, else 1. If it does not fit, it is halved.
        max_batch_size: the last size.
        bisect: after the doubling, go on between the largest size that fits and the smallest that does not, until they
            are at most a sixteenth apart.
        updates: number of updates in a trial. The optimizer's state exists from the second one on.
        memory: bytes of memory that each rank may allocate, on CPUs only; by default an equal share of what is free,
            because a machine that swaps, or ends processes, would be worse than an error.
        on_trial: called after each trial.

    **Cost**: each size starts `nproc` processes, which import torch and build model and data: seconds.

    Raises:
        ConfigError: an argument or the config does not fit, or not even a size of 1 fits.
        TopologyError: this process is a rank itself.
        LaunchError: a rank failed for another reason than memory.
    """
    if os.environ.get(TRIAL_FOLDER):
        raise RuntimeError(
            "find_batch_size() was called while a rank imported this script. Call it under "
            "`if __name__ == '__main__':`, because each rank imports the script to find the function"
        )
    if (launcher := infer_launcher(os.environ)) != "none":
        raise TopologyError(
            f"a search for a batch size must be started once, in a plain process, because it starts ranks for each "
            f"size, but this process is a rank itself ({launcher}). Start it without a launcher, with nproc="
        )
    if isinstance(make_runner, Mapping):
        start = batch_size_in(make_runner) if start is None else start
        make_runner = RunnerOfConfig(make_runner)
    ranks = TrialRanks(make_runner, nproc, updates, memory, on_trial or (lambda trial: None))
    return search_sizes(ranks.trial, 1 if start is None else start, max_batch_size, bisect=bisect, nproc=nproc)


def batch_size_in(cfg: Mapping[str, Any]) -> int:
    """Return the batch size of a config.

    Raises:
        ConfigError: it has none that could be changed.
    """
    loader = cfg.get("train_dataloader")
    if not isinstance(loader, Mapping):
        what = "is None" if loader is None else f"is a {type(loader).__name__}"
        raise ConfigError(
            f"`train_dataloader` must be a config with a batch_size to be searched, but {what}. Give "
            "find_batch_size() a function that returns a Runner for a batch size"
        )
    for name in ("batch_sampler", "global_batch_size"):
        if loader.get(name) is not None:
            raise ConfigError(
                f"`train_dataloader.batch_size` must set the size of batches to be searched, but `{name}` does. Give "
                "find_batch_size() a function that returns a Runner for a batch size"
            )
    size = loader.get("batch_size", 1)
    require_count("train_dataloader.batch_size", size)
    return int(size)


def search_sizes(
    try_size: Callable[[int], Trial], start: int, most: int | None, *, bisect: bool, nproc: int = 1
) -> BatchSizeSearch:
    """Search the largest size that fits: double or halve `start`, then bisect if `bisect` is True.

    Args:
        try_size: tries a size. Sizes up to some limit must fit.
        start: the first size.
        most: the last size.
        bisect: as for `find_batch_size`.
        nproc: number of ranks.

    Raises:
        ConfigError: a number is out of range, or not even a size of 1 fits.
    """
    require_count("start", start)
    if most is not None:
        require_count("max_batch_size", most)
    trials: list[Trial] = []

    def outcome_of(size: int) -> Outcome:
        trials.append(try_size(size))
        return trials[-1].outcome

    low, high, size = 0, None, start if most is None else min(start, most)
    ended_by: Literal["memory", "limit", "samples"] = "memory"
    while high is None and size != low:
        match outcome_of(size):
            case "fits":
                low, size = size, 2 * size if most is None else min(2 * size, most)
                if size == low and ended_by != "samples":  # `most` may come from the number of samples
                    ended_by = "limit"
            case "out of memory":
                high, ended_by = size, "memory"
            case "too few samples" if trials[-1].batch_size == 0:  # not even one batch, as with `drop_last`
                high, ended_by = size, "samples"
            case "too few samples":
                most, ended_by = max(low, trials[-1].batch_size), "samples"
                size = most
    while high is not None and (low == 0 or bisect) and high - low > max(1, low // 16):
        size = (low + high) // 2
        match outcome_of(size):
            case "fits":
                low = size
            case outcome:
                high, ended_by = size, "memory" if outcome == "out of memory" else "samples"
    if low == 0 and ended_by == "samples":
        raise ConfigError("`train_dataloader` must have a batch for each rank, but has none even of a size of 1")
    if low == 0:
        raise ConfigError(
            f"`train_dataloader.batch_size` must be at least 1, but not even 1 fits: {trials[-1].message}\nUse "
            "accumulative_counts, activation checkpointing, bfloat16, strategy fsdp or a smaller model"
        )
    return BatchSizeSearch(low, ended_by, trials, nproc)


@dataclass(frozen=True, slots=True)
class RunnerOfConfig:
    """Makes the Runner for a batch size from a config."""

    cfg: Mapping[str, Any]

    def __call__(self, batch_size: int) -> Runner:
        """Return the Runner for a batch size, in a rank."""
        cfg = self.cfg if isinstance(self.cfg, Config) else Config(dict(self.cfg))
        cfg.merge_from_dict({"train_dataloader.batch_size": batch_size})
        cfg.launcher = "pytorch"
        return Runner.from_cfg(cfg)


class TrialRanks:
    """Starts the ranks that try a size.

    Args:
        make_runner: returns the Runner for a batch size; must be picklable.
        nproc: number of ranks.
        updates: number of updates in a trial.
        memory: bytes for each rank; by default its share of what is free.
        on_trial: called after each trial.

    Raises:
        ConfigError: an argument is out of range, or `make_runner` can't be sent to other processes.
    """

    def __init__(
        self, make_runner: MakeRunner, nproc: int, updates: int, memory: int | None, on_trial: Callable[[Trial], None]
    ) -> None:
        require_count("nproc", nproc)
        require_count("updates", updates, least=2)
        if memory is not None:
            require_count("memory", memory)
            if get_device() != "cpu":
                raise ConfigError(f"`memory` limits ranks on CPUs only, but these are on {get_device()}. Leave it out")
        try:
            pickle.dumps(make_runner)
        except Exception as error:  # an object may pickle itself by its own code
            raise ConfigError(
                f"`make_runner` must be a function of a module, which ranks can import, but can't be pickled: "
                f"{message_of(error)}"
            ) from error
        self._make_runner, self._nproc, self._updates, self._memory = make_runner, nproc, updates, memory
        self._on_trial = on_trial

    def trial(self, size: int) -> Trial:
        """Try one size."""
        memory = self._memory
        if memory is None and get_device() == "cpu" and (free := _free_memory()) is not None:
            memory = free // self._nproc
        with tempfile.TemporaryDirectory(prefix="lockstep-") as folder:
            request = {"make_runner": self._make_runner, "size": size, "updates": self._updates, "memory": memory}
            Path(folder, "request").write_bytes(pickle.dumps(_main_module()) + pickle.dumps(request))
            failure = self._failure_of(folder)
            results = [
                json.loads(file.read_text(encoding="utf-8")) for file in sorted(Path(folder).glob("rank_*.json"))
            ]
        found = _summary(size, [Trial(**one) for one in results], self._nproc, failure)
        self._on_trial(found)
        return found

    def _failure_of(self, folder: str) -> LaunchError | None:
        os.environ[TRIAL_FOLDER] = folder
        try:
            launch(["-m", "lockstep.runner.batch_size_trial"], JobSpec(self._nproc), log_dir=Path(folder, "logs"))
        except LaunchError as error:
            return error
        finally:
            del os.environ[TRIAL_FOLDER]
        return None


def _summary(size: int, results: list[Trial], nproc: int, failure: LaunchError | None) -> Trial:
    """Return the result of a trial from those of its ranks.

    Raises:
        LaunchError: a rank failed for another reason than memory.
    """
    for outcome in ("out of memory", "too few samples"):
        if found := [one for one in results if one.outcome == outcome]:
            return min(found, key=lambda one: one.batch_size)
    if failure is not None and "was ended by SIGKILL" in str(failure):
        return Trial(size, "out of memory", message="a rank was ended by SIGKILL, as the system does to free memory")
    if failure is not None or len(results) < nproc:
        raise failure or LaunchError(f"{counted(nproc - len(results), 'rank')} ended without a result")
    memory, speed = [one.memory_mib or 0.0 for one in results], [one.samples_per_second or 0.0 for one in results]
    return Trial(size, "fits", max(memory) or None, min(speed))


def _main_module() -> dict[str, Any]:
    """Return how a rank imports the script of this process, as `multiprocessing` does."""
    data: dict[str, Any] = multiprocessing.spawn.get_preparation_data("trial")
    kept = ("sys_path", "dir", "init_main_from_name", "init_main_from_path")
    return {"sys_path": sys.path, **{name: data[name] for name in kept if name in data}}


def _free_memory() -> int | None:
    """Return the bytes that processes can still allocate here; None if that is not known.

    Source: proc(5), MemAvailable; the kernel's cgroup v2 documentation, memory.max and memory.current.
    """
    free = []
    with suppress(OSError, StopIteration, ValueError):
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        free.append(1024 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")))
    with suppress(OSError, ValueError):  # "max" is no number
        limit, used = (int((_CGROUP / name).read_text(encoding="ascii")) for name in ("memory.max", "memory.current"))
        free.append(max(limit - used, 0))
    return min(free, default=None)
