"""A job in which rank 1 does not arrive: `late.py FAULT PLACE TIMEOUT`."""

from __future__ import annotations

import os
import signal
import sys
import time

import torch
from torch import nn

from lockstep.dist import all_reduce, barrier, get_rank, init_dist
from lockstep.model.wrapper import train_step
from lockstep.strategy import build_strategy

FAULT, PLACE, TIMEOUT = sys.argv[1], sys.argv[2], float(sys.argv[3])


def loop_for_ever() -> None:
    while True:
        pass


FAULTS = {
    "loop": loop_for_ever,
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "exit": lambda: sys.exit(0),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
}


class Faulty(nn.Module):
    """A model whose forward pass fails on rank 1, in the third call."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls == 3:
            print(f"\nfault at {time.time()}", flush=True)
            if get_rank() == 1:
                FAULTS[FAULT]()
        return self.layer(x).sum()


def train() -> None:
    model = Faulty()
    wrapped, optim_wrapper = build_strategy(PLACE).prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert optim_wrapper is not None
    for _ in range(5):
        train_step(wrapped, torch.ones(2, 4), optim_wrapper)


def call() -> None:
    barrier()
    print(f"\nfault at {time.time()}", flush=True)
    if get_rank() == 1:
        FAULTS[FAULT]()
    all_reduce(torch.ones(50))


init_dist("pytorch", timeout=TIMEOUT)
try:
    call() if PLACE == "call" else train()
except Exception as error:
    print(f"\nraised at {time.time()} {type(error).__name__}: {error}", flush=True)
    sys.exit(3)
