"""How far a loop is, on one line of a terminal."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Sized
from multiprocessing import Pool
from multiprocessing.pool import Pool as PoolOfProcesses
from typing import Any, TextIO

from mmengine.utils.timer import Timer

__all__ = ["ProgressBar", "init_pool", "track_iter_progress", "track_parallel_progress", "track_progress"]


class ProgressBar:
    """A bar that grows with each task that is done.

    Args:
        task_num: how many tasks there are; 0 if that is unknown, then only their number is shown.
        bar_width: the width of the bar in characters; narrower where the terminal is.
        start: show it at once.
        file: where it is written.

    Attributes:
        completed: how many tasks are done.
    """

    def __init__(self, task_num: int = 0, bar_width: int = 50, start: bool = True, file: TextIO = sys.stdout) -> None:
        self.task_num = task_num
        self.bar_width = bar_width
        self.completed = 0
        self.file = file
        self.timer = Timer(start=False)
        if start:
            self.start()

    @property
    def terminal_width(self) -> int:
        """The number of columns of the terminal."""
        return shutil.get_terminal_size().columns

    def start(self) -> None:
        """Show an empty bar, and count the time from now on."""
        count = (
            f"[{' ' * self.bar_width}] 0/{self.task_num}, elapsed: 0s, ETA:"
            if self.task_num > 0
            else ("completed: 0, elapsed: 0s")
        )
        self._write(count)
        self.timer = Timer()

    def update(self, num_tasks: int = 1) -> None:
        """Count tasks that are done, at least one."""
        if num_tasks <= 0:
            raise AssertionError(f"`num_tasks` must be above 0, but is {num_tasks}")
        self.completed += num_tasks
        elapsed = self.timer.since_start()
        speed = self.completed / elapsed if elapsed > 0 else float("inf")
        if self.task_num <= 0:
            self._write(f"completed: {self.completed}, elapsed: {int(elapsed + 0.5)}s, {speed:.1f} tasks/s")
            return
        part = self.completed / self.task_num
        remaining = int(elapsed * (1 - part) / part + 0.5)
        text = f" {self.completed}/{self.task_num}, {speed:.1f} task/s, elapsed: {int(elapsed + 0.5)}s"
        text += f", ETA: {remaining:5}s"
        width = max(2, min(self.bar_width, self.terminal_width - len(text) - 2, int(self.terminal_width * 0.6)))
        done = int(width * part)
        self._write(f"\r[{'>' * done}{' ' * (width - done)}]{text}")

    def _write(self, text: str) -> None:
        self.file.write(text)
        self.file.flush()


def _tasks(tasks: Any) -> tuple[Iterable[Any], int]:
    """Return the tasks and their number, which may be given as a pair."""
    if isinstance(tasks, tuple):
        if len(tasks) != 2 or not isinstance(tasks[0], Iterable) or not isinstance(tasks[1], int):
            raise AssertionError("`tasks` must be a sequence, or a pair of an iterable and its length")
        return tasks
    if isinstance(tasks, Sized) and isinstance(tasks, Iterable):
        return tasks, len(tasks)
    raise TypeError(f"`tasks` must be a sequence, or a pair of an iterable and its length, but is {tasks!r}")


def _tracked(results: Iterable[Any], bar: ProgressBar) -> Iterator[Any]:
    for result in results:
        yield result
        bar.update()
    bar.file.write("\n")


def track_progress(
    func: Callable[..., Any], tasks: Any, bar_width: int = 50, file: TextIO = sys.stdout, **kwargs: Any
) -> list[Any]:
    """Return the result of `func` for each task, and show how far it is.

    Args:
        func: called with a task and `kwargs`.
        tasks: a sequence, or a pair of an iterable and its length.
        bar_width: as for `ProgressBar`.
        file: as for `ProgressBar`.
        **kwargs: further arguments of `func`.
    """
    items, count = _tasks(tasks)
    return list(_tracked((func(item, **kwargs) for item in items), ProgressBar(count, bar_width, file=file)))


def track_iter_progress(tasks: Any, bar_width: int = 50, file: TextIO = sys.stdout) -> Iterator[Any]:
    """Yield the tasks, and show how many of them the loop has done."""
    items, count = _tasks(tasks)
    return _tracked(items, ProgressBar(count, bar_width, file=file))


def init_pool(
    process_num: int, initializer: Callable[..., Any] | None = None, initargs: tuple[Any, ...] | None = None
) -> PoolOfProcesses:
    """Return a pool of processes, each of which calls `initializer` with `initargs` first."""
    return Pool(process_num, initializer, initargs or ())


def track_parallel_progress(
    func: Callable[..., Any],
    tasks: Any,
    nproc: int,
    initializer: Callable[..., Any] | None = None,
    initargs: tuple[Any, ...] | None = None,
    bar_width: int = 50,
    chunksize: int = 1,
    skip_first: bool = False,
    keep_order: bool = True,
    file: TextIO = sys.stdout,
) -> list[Any]:
    """Return the result of `func` for each task, computed in several processes, and show how far it is.

    Args:
        func: called with a task; it and the tasks are pickled.
        tasks: a sequence, or a pair of an iterable and its length.
        nproc: the number of processes.
        initializer: called in each process at its start.
        initargs: the arguments of `initializer`.
        bar_width: as for `ProgressBar`.
        chunksize: how many tasks a process gets at a time.
        skip_first: leave the first task of each process out of the times; as it is slow.
        keep_order: results in the order of the tasks; else as they are done.
        file: as for `ProgressBar`.
    """
    items, count = _tasks(tasks)
    first = nproc * chunksize if skip_first else 0
    bar = ProgressBar(count - first, bar_width, start=False, file=file)
    results = []
    with init_pool(nproc, initializer, initargs) as pool:
        if not skip_first:
            bar.start()
        for result in (pool.imap if keep_order else pool.imap_unordered)(func, items, chunksize):
            results.append(result)
            if skip_first and len(results) < first:
                continue
            if skip_first and len(results) == first:
                bar.start()
                continue
            bar.update()
    bar.file.write("\n")
    return results
