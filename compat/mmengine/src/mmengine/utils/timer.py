"""Seconds since a start."""

from __future__ import annotations

from time import perf_counter
from typing import Any, Self

__all__ = ["Timer", "TimerError", "check_time"]


class TimerError(Exception):
    """A timer is read that does not run."""


class Timer:
    """Counts seconds, also as a context, at whose end it prints them.

    Args:
        start: start at once.
        print_tmpl: what the end of the context prints, with a place for the seconds.

    Example:
        >>> timer = Timer()
        >>> timer.is_running, timer.since_start() >= 0
        (True, True)
    """

    def __init__(self, start: bool = True, print_tmpl: str | None = None) -> None:
        self._is_running = False
        self.print_tmpl = print_tmpl or "{:.3f}"
        self._start = self._last = 0.0
        if start:
            self.start()

    @property
    def is_running(self) -> bool:
        """Whether it has been started."""
        return self._is_running

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        print(self.print_tmpl.format(self.since_last_check()))
        self._is_running = False

    def start(self) -> None:
        """Start, if it does not run."""
        if not self._is_running:
            self._start, self._is_running = perf_counter(), True
        self._last = perf_counter()

    def since_start(self) -> float:
        """Return the seconds since the start."""
        self._must_run()
        self._last = perf_counter()
        return self._last - self._start

    def since_last_check(self) -> float:
        """Return the seconds since this or `since_start` was called last."""
        self._must_run()
        before, self._last = self._last, perf_counter()
        return self._last - before

    def _must_run(self) -> None:
        if not self._is_running:
            raise TimerError("the timer must be started before it is read")


_timers: dict[Any, Timer] = {}


def check_time(timer_id: str) -> float:
    """Return the seconds since the last call with the same `timer_id`; 0 at the first."""
    if timer_id in _timers:
        return _timers[timer_id].since_last_check()
    _timers[timer_id] = Timer()
    return 0.0
