"""Two displays of progress: a live bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

from time import perf_counter
from typing import TypeAlias

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn


class LiveDisplay:
    """A progress bar at the bottom of a terminal, below all other output.

    It is drawn only when `show` is called: a drawing thread would interrupt training at arbitrary moments.
    """

    period_seconds = 0.2

    def __init__(self, console: Console) -> None:
        self._progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[text]}"),
            console=console,
            auto_refresh=False,
            transient=True,
            expand=True,
        )
        self._task = self._progress.add_task("", total=None, text="")
        self._label_width = 0

    def begin(self, label: str, total: int | None) -> None:
        """Replace the bar by a new one, with the text and the label width of the old one."""
        self._label_width = max(self._label_width, len(label))
        self._progress.start()
        self._progress.reset(self._task, description=label.ljust(self._label_width), total=total)

    def show(self, done: int, text: str) -> None:
        """Draw the bar."""
        self._progress.update(self._task, completed=done, text=text)
        self._progress.refresh()

    def close(self) -> None:
        """Remove the bar."""
        self._progress.stop()


class PlainDisplay:
    """Progress as plain lines at intervals, for a log that is read afterwards.

    Args:
        console: where the lines go.
        period_seconds: time from one line to the next, within a pass.
    """

    def __init__(self, console: Console, period_seconds: float = 30.0) -> None:
        self.period_seconds = period_seconds
        self._console = console
        self._label = ""
        self._total: int | None = None
        self._last_line = perf_counter()

    def begin(self, label: str, total: int | None) -> None:
        """Set the label and the total of the lines that follow."""
        self._label = label
        self._total = total
        self._last_line = perf_counter()

    def show(self, done: int, text: str) -> None:
        """Print a line if `period_seconds` have passed since the last one."""
        now = perf_counter()
        if now - self._last_line >= self.period_seconds:
            self._last_line = now
            of_total = "" if self._total is None else f"/{self._total}"
            self._console.print(f"{self._label}  {done}{of_total}  {text}", markup=False, soft_wrap=True)

    def close(self) -> None:
        """Do nothing: printed lines stay."""


Display: TypeAlias = LiveDisplay | PlainDisplay
