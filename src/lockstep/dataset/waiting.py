"""Saying that a data loader has given no batch for long: torch does not, and on a single rank nobody else would."""

from __future__ import annotations

import logging
import os
import threading
import time
from typing import Any

from lockstep.errors import counted
from lockstep.groups import this_rank

_SECONDS_TO_SAY = 60.0  # then at doubling intervals
_LOOKS = 12  # within these seconds
_logger = logging.getLogger(__name__)


class Wait:
    """Says that a batch has been awaited for a minute; a context manager around each wait of one pass.

    Each further message of the pass comes after twice as long a wait, so that a loader that is only slow says little.

    **Cost**: a microsecond for a batch, and a thread, which sleeps, until `ended` is set.

    Args:
        loader: the loader.
    """

    def __init__(self, loader: Any) -> None:
        workers = getattr(loader, "num_workers", 0)
        self._from = f"{type(getattr(loader, 'dataset', loader)).__name__}, "
        self._from += f"of {counted(workers, 'worker')}" if workers else "without workers"
        self._remedy = "; DataLoader(timeout=<seconds>) lets workers that hang raise an error" if workers else ""
        self._began: float | None = None
        self._due = _SECONDS_TO_SAY
        self.ended = threading.Event()
        threading.Thread(target=self._look, name="lockstep-data", daemon=True).start()

    def __enter__(self) -> None:
        self._began = time.monotonic()

    def __exit__(self, *error: object) -> None:
        self._began = None

    def _look(self) -> None:
        while not self.ended.wait(_SECONDS_TO_SAY / _LOOKS):
            began = self._began
            if began is not None and (passed := time.monotonic() - began) >= self._due:
                self._due *= 2
                _logger.warning(
                    "waiting %.0f s for a batch of the data loader over %s (%s). `py-spy dump --subprocesses --pid %d` "
                    "shows where it is%s",
                    passed, self._from, this_rank(), os.getpid(), self._remedy,
                )  # fmt: skip
