"""The mean time of a function or of a block."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from time import perf_counter
from typing import Any, ClassVar, Self, TypeVar

import torch

from mmengine.logging import print_log

_F = TypeVar("_F", bound=Callable[..., Any])

__all__ = ["TimeCounter"]


class TimeCounter:
    """Counts how long a function or a block takes on average, as a decorator or a context.

    Args:
        log_interval: after how many calls the mean is logged.
        warmup_interval: how many first calls do not count.
        with_sync: wait for the CUDA device before each reading.
        tag: the name in the log; required for a context.
        logger: as for `print_log`.

    Example:
        >>> with TimeCounter(tag="block"):
        ...     pass
        >>> TimeCounter.instances["block"].count
        1
    """

    instances: ClassVar[dict[str, TimeCounter]] = {}

    log_interval: int
    warmup_interval: int
    with_sync: bool
    tag: str | None
    logger: logging.Logger | str | None
    count: int
    seconds: float

    def __new__(
        cls,
        log_interval: int = 1,
        warmup_interval: int = 1,
        with_sync: bool = True,
        tag: str | None = None,
        logger: logging.Logger | str | None = None,
    ) -> Self:
        """Return the counter of `tag`, which counts on, or a new one."""
        if tag is not None and tag in cls.instances:
            known: Any = cls.instances[tag]
            return known  # type: ignore[no-any-return]
        self = super().__new__(cls)
        self.log_interval, self.warmup_interval, self.with_sync = log_interval, warmup_interval, with_sync
        self.tag, self.logger, self.count, self.seconds = tag, logger, 0, 0.0
        if tag is not None:
            cls.instances[tag] = self
        return self

    def __call__(self, func: _F) -> _F:
        """Return `func`, counted."""
        self.tag = self.tag or func.__name__

        @functools.wraps(func)
        def call(*args: Any, **kwargs: Any) -> Any:
            with self:
                return func(*args, **kwargs)

        return call  # type: ignore[return-value]

    def __enter__(self) -> None:
        if self.tag is None:
            raise AssertionError("`tag` must be given for a counter that is used as a context")
        self._wait()
        self._start = perf_counter()

    def __exit__(self, *error: object) -> None:
        self._wait()
        self.count += 1
        if self.count > self.warmup_interval:
            self.seconds += perf_counter() - self._start
        self.print_time(self.seconds)

    def print_time(self, elapsed: int | float) -> None:
        """Log the mean time, where `log_interval` calls are done."""
        counted = self.count - self.warmup_interval
        if counted >= 1 and self.count % self.log_interval == 0:
            print_log(
                f"[{self.tag}]-time per run averaged in the past {self.count} runs: {elapsed / counted * 1000:.1f} ms",
                self.logger,
            )

    def _wait(self) -> None:
        if self.with_sync and torch.cuda.is_available():
            torch.cuda.synchronize()
