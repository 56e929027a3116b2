"""What is measured of a training, from its own steps: time, memory, and how often the host waited for the GPU."""

from __future__ import annotations

import time
import warnings
from contextlib import ExitStack

import torch

from lockstep.device import get_device

_WAIT = "called a synchronizing CUDA operation"


class Watch:
    """Steps of a training: some that warm up, some that are timed, some in which waits are counted.

    A wait is what `torch.cuda.set_sync_debug_mode` knows: a read of the device by the host, or a blocking copy. With
    ``"error"`` the first would end the training; ``"warn"`` finds the same, and they can be counted.

    Attributes:
        seconds: of a timed step, on this rank; None before they are over.
        peak_bytes: the most that tensors took on the device until then; None on the CPU.
        waits: number of waits in the steps that are watched for them; None where torch can't count them.
        where: the line that waits first.
    """

    WARM, TIMED, WATCHED = 10, 40, 10

    def __init__(self, small: bool = False) -> None:
        self._ends = (2, 4, 6) if small else (self.WARM, self.WARM + self.TIMED, self.WARM + self.TIMED + self.WATCHED)
        self.steps = self._ends[-1]
        self._done = 0
        self._open = ExitStack()
        self._seen: list[warnings.WarningMessage] = []
        self.seconds: float | None = None
        self.peak_bytes: int | None = None
        self.waits: int | None = None
        self.where = ""

    def step(self) -> None:
        """Note the end of a step."""
        self._done += 1
        warm, timed, watched = self._ends
        if self._done == warm:
            settle()
            if get_device() != "cpu":
                torch.accelerator.reset_peak_memory_stats()
            self._begin = time.perf_counter()
        elif self._done == timed:
            settle()
            self.seconds = (time.perf_counter() - self._begin) / (timed - warm)
            self.peak_bytes = None if get_device() == "cpu" else torch.accelerator.max_memory_allocated()
            self._look()
        elif self._done == watched:
            self.close()

    def _look(self) -> None:
        self._seen = self._open.enter_context(warnings.catch_warnings(record=True))
        warnings.simplefilter("always")
        if get_device() == "cuda":
            torch.cuda.set_sync_debug_mode("warn")
            self._open.callback(torch.cuda.set_sync_debug_mode, "default")

    def close(self) -> None:
        """Count the waits; also where the training has failed."""
        self._open.close()
        found = [one for one in self._seen if _WAIT in str(one.message)]
        if get_device() == "cuda":
            self.waits = len(found)
        self.where = f"{found[0].filename}:{found[0].lineno}" if found else ""


def settle() -> None:
    """Wait until the device has done what it was given."""
    if get_device() != "cpu":
        torch.accelerator.synchronize()
