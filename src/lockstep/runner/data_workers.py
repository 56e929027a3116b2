"""The workers of data loaders: seeds, signals that they outlive, how they end, and scripts that they import anew."""

from __future__ import annotations

import atexit
import multiprocessing
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from multiprocessing import active_children
from multiprocessing.util import Finalize
from types import FrameType
from typing import Any

from torch.utils.data import DataLoader, get_worker_info

from lockstep.dataset.random_state import seed_transforms

_SECONDS_TO_END = (0.1, 0.5, 1.0)  # of workers, after a SIGTERM each


def prepare_workers(loader: Any, names: Iterable[str]) -> None:
    """Let the workers of a `DataLoader` seed their transforms, and outlive signals that are sent to all processes.

    Slurm sends some to all processes of a job. The signals take the place of those of another Runner that has had the
    loader before; without `names`, all end the workers. For the seeds see `seed_transforms`.
    """
    if isinstance(loader, DataLoader):
        init: Any = loader.worker_init_fn
        if isinstance(init, partial) and init.func is _init_worker:
            init = init.args[0]
        # An unknown name is refused where the training begins.
        numbers = tuple(number for name, number in signal.Signals.__members__.items() if name in names)
        loader.worker_init_fn = partial(_init_worker, init, numbers)


@cache
def end_workers_at_exit() -> None:
    """End workers that are left at the end of this process, as after an error.

    Python sends them one SIGTERM then, which they may outlive, and waits for them, for ever. Before that, the end of
    the process group collects garbage: torch's iterator in it closes the queues of its workers before it asks them to
    end, and then waits 5 s for each of them (torch 2.13). So they end before the group does, which was made earlier.
    """
    atexit.register(Finalize(None, _end_workers, exitpriority=0))  # which does nothing in a forked process


def refuse_script_imported_by_worker() -> None:
    """Refuse to train in a process of `multiprocessing` that is only importing the script of the process before it.

    Raises:
        RuntimeError: this is such a process.
    """
    # The mark by which `multiprocessing` itself refuses to start processes here (Python 3.11 to 3.14).
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise RuntimeError(
            "training must begin under `if __name__ == '__main__':`, but begins while a new process imports the "
            "script, as each data worker does that is started by spawn or forkserver. Put the lines that train under "
            "`if __name__ == '__main__':`, or start the workers by fork"
        )


def _end_workers() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler raises an error for a worker that a signal ends
    for patience in _SECONDS_TO_END:
        workers = [process for process in active_children() if process.daemon]
        for process in workers:
            process.terminate()
        deadline = time.monotonic() + patience
        for process in workers:
            process.join(max(0.0, deadline - time.monotonic()))


def _init_worker(worker_init_fn: Callable[[int], None] | None, numbers: Sequence[int], worker: int) -> None:
    for number in {signal.SIGINT, *numbers} if numbers else ():  # a terminal sends Ctrl-C to all processes
        signal.signal(number, _ignore_first if number == signal.SIGTERM else signal.SIG_IGN)
    if (info := get_worker_info()) is not None:
        seed_transforms(info.dataset, info.seed)
    if worker_init_fn is not None:
        worker_init_fn(worker)


def _ignore_first(number: int, frame: FrameType | None) -> None:
    """Let the next signal end the process: torch and Python end a worker that is slow to stop by SIGTERM."""
    signal.signal(number, signal.SIG_DFL)
