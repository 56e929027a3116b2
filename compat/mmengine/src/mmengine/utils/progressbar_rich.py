"""How far calls in several processes are, shown by rich."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sized
from multiprocessing import Pool
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

__all__ = ["track_progress_rich"]


class _Unpacked:
    """Calls a function with a tuple as its arguments, or a dict as its keywords."""

    def __init__(self, func: Callable[..., Any]) -> None:
        self.func = func

    def __call__(self, task: Any) -> Any:
        if isinstance(task, dict):
            return self.func(**task)
        return self.func(*task) if isinstance(task, tuple) else self.func(task)


def track_progress_rich(
    func: Callable[..., Any],
    tasks: Iterable[Any] = (),
    task_num: int | None = None,
    nproc: int = 1,
    chunksize: int = 1,
    description: str = "Processing",
    color: str = "blue",
) -> list[Any]:
    """Return the result of `func` for each task: a tuple of arguments, a dict of keywords, or the only argument.

    Args:
        func: what is called.
        tasks: the tasks; if there are none, `func` is called without arguments `task_num` times.
        task_num: how many tasks there are; by default the length of `tasks`.
        nproc: the number of processes.
        chunksize: how many tasks a process gets at a time.
        description: shown before the bar.
        color: of the bar.
    """
    if not callable(func):
        raise TypeError(f"`func` must be callable, but is {func!r}")
    if not isinstance(tasks, Iterable):
        raise TypeError(f"`tasks` must be an iterable, but is {tasks!r}")
    if isinstance(tasks, Sized):
        if len(tasks) == 0:
            if task_num is None:
                raise ValueError("`task_num` must be given where there are no `tasks`")
            tasks = [()] * task_num
        elif task_num is not None and task_num != len(tasks):
            raise ValueError(f"`task_num` must be the number of tasks, {len(tasks)}, but is {task_num}")
        else:
            task_num = len(tasks)
    if nproc <= 0:
        raise ValueError(f"`nproc` must be above 0, but is {nproc}")
    columns = (BarColumn(), MofNCompleteColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(TextColumn("{task.description}"), *columns) as progress:
        shown = progress.add_task(f"[{color}]{description}", total=task_num)
        results = []
        for result in _results(_Unpacked(func), tasks, nproc, chunksize):
            results.append(result)
            progress.advance(shown)
    return results


def _results(func: _Unpacked, tasks: Iterable[Any], nproc: int, chunksize: int) -> Iterator[Any]:
    if nproc == 1:
        yield from map(func, tasks)
        return
    with Pool(nproc) as pool:
        yield from pool.imap(func, tasks, chunksize)
