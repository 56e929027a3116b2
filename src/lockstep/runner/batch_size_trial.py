"""One rank of a trial of a batch size: ``python -m lockstep.runner.batch_size_trial``.

It writes its result into a file of the folder that the variable `TRIAL_FOLDER` names, and ends with an error if it runs
out of memory, so that its agent ends the other ranks.
"""

from __future__ import annotations

import errno
import json
import multiprocessing.spawn
import os
import pickle
from contextlib import redirect_stdout
from dataclasses import asdict, replace
from pathlib import Path
from time import perf_counter

import torch

from lockstep.dataset import amount_of
from lockstep.device import peak_memory
from lockstep.dist import all_gather_object
from lockstep.errors import ConfigError, error_in_words, with_causes
from lockstep.runner.batch_size_finder import TRIAL_FOLDER, MakeRunner, Trial
from lockstep.runner.loops import NO_BATCHES
from lockstep.runner.lr_finder import rehearse
from lockstep.runner.run import TrainRun

# What libraries say that have run out of memory, besides torch.OutOfMemoryError and MemoryError.
_OUT_OF_MEMORY = (
    "out of memory",  # CUDA, NCCL
    "can't allocate memory",  # torch's allocator for CPUs
    "cannot allocate memory",
    "not enough memory",
    "bad_alloc",
    "alloc_failed",  # cuBLAS, cuDNN
    "could not create a memory",  # oneDNN
    "can't start new thread",
    "killed by signal: killed",  # a worker of a DataLoader
)


def main() -> None:
    """Try the size that has been asked for, and write the result."""
    folder = Path(os.environ[TRIAL_FOLDER])
    with (folder / "request").open("rb") as stream:
        multiprocessing.spawn.prepare(pickle.load(stream))
        request = pickle.load(stream)
    file = folder / f"rank_{os.environ['RANK']}.json"
    try:
        with (folder / f"printed_{os.environ['RANK']}").open("w") as printed, redirect_stdout(printed):
            found = try_size(folder, **request)
    except Exception as error:
        if (message := out_of_memory_message(error)) is None:
            raise
        _write(file, Trial(request["size"], "out of memory", message=message))
        os._exit(1)  # at once, because the others wait for this rank
    _write(file, found)


def try_size(folder: Path, make_runner: MakeRunner, size: int, updates: int, memory: int | None) -> Trial:
    """Train for some updates with batches of `size` samples.

    Args:
        folder: where to put the run's folder.
        make_runner: returns the Runner for a batch size.
        size: the batch size.
        updates: number of updates.
        memory: bytes that this process may allocate; None for no limit.

    **Collective**: every rank.
    """
    if memory is not None:
        _limit_memory(memory)
    runner = make_runner(size)
    runner.args = replace(runner.args, log_level="ERROR", resume=False, work_dir=folder / "runs")
    seconds = 0.0
    try:
        with runner.rehearsing("tried") as run:
            rehearsal = rehearse(run)
            for count in range(updates):
                began = perf_counter()
                first = next(rehearsal).batch_size
                seconds = perf_counter() - began
                if count == 0 and (least := min(all_gather_object(_size_of_first(run, size, first)))) < size:
                    return Trial(least, "too few samples")
            rehearsal.close()
            accumulated = getattr(run.optim_wrapper, "accumulative_counts", 1)
            rate = size * accumulated * run.data_shard.size / seconds
    except ConfigError as error:
        if NO_BATCHES not in str(error):
            raise
        return Trial(0, "too few samples")
    peak = peak_memory()
    return Trial(size, "fits", None if peak is None else peak / 2**20, rate)


def out_of_memory_message(error: BaseException | None) -> str | None:
    """Return the message of an error, or of its cause, that says that memory has run out; None if none does."""
    for one in with_causes(error):
        text = error_in_words(one)
        if isinstance(one, MemoryError | torch.OutOfMemoryError) or any(m in text.lower() for m in _OUT_OF_MEMORY):
            return text.splitlines()[0]
        if isinstance(one, OSError) and one.errno == errno.ENOMEM:
            return text
    return None


def _size_of_first(run: TrainRun, size: int, counted: int) -> int:
    """Return the number of samples in this rank's first batch; `size` if that can't be told."""
    if (amount := amount_of(run.train_dataloader)) is not None:
        return amount.size_of(0)
    return counted if getattr(run.train_dataloader, "batch_size", None) == size else size


def _limit_memory(size: int) -> None:
    """Let allocations beyond `size` bytes fail in this process and in those that it starts (on Linux)."""
    import resource  # not available on Windows

    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (size if hard == resource.RLIM_INFINITY else min(size, hard), hard))


def _write(file: Path, found: Trial) -> None:
    draft = file.with_suffix(".draft")  # this process may be ended while it writes
    draft.write_text(json.dumps(asdict(found)), encoding="utf-8")
    draft.replace(file)


if __name__ == "__main__":
    main()
