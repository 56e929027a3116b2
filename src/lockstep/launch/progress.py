"""How far a rank's training has come, told to the launcher: it restarts no job that fails at the same iteration again.

A rank stores the number in a small file that it maps into its memory; the launcher reads it when the rank has failed.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from mmap import mmap
from pathlib import Path

ITERATION_FILE = "LOCKSTEP_ITERATION_FILE"
"""Variable that names the file, one for each rank."""

_SIZE = 8  # bytes: an integer, little-endian


def iteration_teller() -> Callable[[int], None]:
    """Return a function that tells the launcher, if one asks, how many iterations this rank has completed.

    **Cost** of a call: 8 bytes in memory, without a system call.
    """
    path = os.environ.get(ITERATION_FILE)
    if path:
        with suppress(OSError):  # a full disk must not end a training
            memory = _mapped(path)

            def tell(iteration: int) -> None:
                memory[:] = iteration.to_bytes(_SIZE, "little")

            return tell
    return lambda iteration: None


def read_iteration(path: str | Path) -> int | None:
    """Return how many iterations a rank has completed, or None if it has not told."""
    with suppress(OSError):
        told = Path(path).read_bytes()
        return int.from_bytes(told, "little") if len(told) == _SIZE else None
    return None


@cache
def _mapped(path: str) -> mmap:
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.pwrite(file, bytes(_SIZE), 0)  # so that the disk has room for what the memory is written to
        return mmap(file, _SIZE)
    except OSError:
        os.ftruncate(file, 0)  # better nothing than a number that never changes
        raise
    finally:
        os.close(file)
