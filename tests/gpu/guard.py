"""No waits for the GPU: torch raises where the host reads the device, or copies to it from unpinned memory."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch

from lockstep.device import get_device
from lockstep.hooks import Hook


def set_mode(mode: Literal["default", "error"]) -> None:
    """Choose what a wait for the GPU does; elsewhere, nothing."""
    if get_device() == "cuda":
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
            torch.cuda.set_sync_debug_mode(mode)


@contextmanager
def no_syncs() -> Iterator[None]:
    set_mode("error")
    try:
        yield
    finally:
        set_mode("default")


class NoSyncs(Hook):
    """Lets a wait for the GPU raise, from the end of one iteration to that of another: batches are fetched within."""

    priority = "LOWEST"

    def __init__(self, first: int, last: int) -> None:
        self.first, self.last = first, last

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None) -> None:
        if runner.iter + 1 == self.first:
            set_mode("error")
        elif runner.iter + 1 == self.last:
            set_mode("default")
