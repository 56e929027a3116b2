"""Jobs whose ranks are processes that the test starts itself, so that each one's exit code and output can be seen."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple


class Ended(NamedTuple):
    """A rank that has ended: its exit code, and what it printed, also to stderr."""

    code: int
    output: str


def run_job(
    size: int,
    *command: str,
    environment: dict[str, str] | None = None,
    meanwhile: Callable[[list[subprocess.Popen[str]]], None] | None = None,
    timeout: float = 90,
) -> list[Ended]:
    """Run a script on several ranks, and return how each has ended; after `timeout` seconds the ranks are killed."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    shared = {
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "OMP_NUM_THREADS": "1",
    }
    base = {**os.environ, **shared, "MASTER_PORT": str(port), **(environment or {})}
    ranks = [
        subprocess.Popen(
            [sys.executable, *command],
            env={**base, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        if meanwhile is not None:
            meanwhile(ranks)
        deadline, ended = time.monotonic() + timeout, []
        for rank in ranks:
            output, _ = rank.communicate(timeout=max(1.0, deadline - time.monotonic()))
            ended.append(Ended(rank.returncode, output))
        return ended
    finally:
        for rank in ranks:
            with suppress(ProcessLookupError):
                rank.kill()
            rank.communicate()
