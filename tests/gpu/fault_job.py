"""A rank of a job whose last rank goes wrong amid collectives on its device: `python -m tests.gpu.fault_job FAULT`."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable

import torch

from lockstep import dist

TIMEOUT = 8.0  # seconds


def reduce(op: str = "sum") -> None:
    data = torch.ones(1000, device=dist.get_device())
    dist.all_reduce(data, op)
    data.sum().item()  # where the host of a GPU waits


FAULTS: dict[str, Callable[[], object]] = {
    "another op": lambda: reduce("max"),
    "a call left out": lambda: dist.destroy_dist(),
    "ends": lambda: os._exit(3),
    "is killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "is stopped": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "is late": lambda: time.sleep(10 * TIMEOUT),
}


def main(fault: str) -> None:
    dist.init_dist("pytorch", timeout=TIMEOUT)
    rank, size = dist.get_dist_info()
    for _ in range(30):  # more than are compared in every mode
        reduce()
    if rank == size - 1:
        FAULTS[fault]()
    else:
        reduce()
    dist.destroy_dist()


if __name__ == "__main__":
    main(sys.argv[1])
