"""A rank whose calls hang on the simulated accelerator, as with NCCL. Usage: hanging.py FAULT TIMEOUT FOLDER [WAIT].

FAULT is a key of `FAULTS`: what rank 1, or the variable CULPRIT, does, where the others sum two numbers; in a training
after `ddp, ` or `fsdp, `.
Then all ranks read a value of their device, or, if WAIT is `looping`, work on; if it is `nothing`, they make no more
calls. Each writes its error, and when it came after the fault, as JSON.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as torch_dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

sys.path.insert(0, str(Path(__file__).parent))

from sim import simulator

from lockstep import Session, dist
from lockstep.dist.consistency import FIRST_CALLS
from lockstep.errors import DistError
from lockstep.groups import resolve

RANK = int(os.environ["RANK"])
CULPRIT = int(os.environ.get("CULPRIT", "1"))


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype).to("sim")


# Made once, as copies to the device wait.
DATA: torch.Tensor
MORE: torch.Tensor
WHOLE: torch.Tensor
PAIR: torch_dist.ProcessGroup


def usual() -> None:
    dist.all_reduce(DATA)


def sleep(seconds: float) -> None:
    time.sleep(seconds)
    usual()


FAULTS: dict[str, Callable[[], object]] = {
    "op": lambda: dist.all_reduce(DATA, "max"),
    "dtype": lambda: dist.all_reduce(WHOLE),
    "shape": lambda: dist.all_reduce(MORE),
    "order": lambda: (dist.broadcast(DATA), usual()),
    "left out": lambda: dist.broadcast(DATA),
    "asynchronous": lambda: dist.all_reduce(MORE, async_op=True),
    "dead": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "raises": lambda: 1 / 0,
    "stopped": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "late": partial(sleep, 8.0),
    "slow": partial(sleep, 2.5),
    "other group": lambda: dist.all_reduce(DATA, group=PAIR),
}


def train(strategy: str, folder: Path, fails: Callable[[], object]) -> None:
    """Make steps that read their loss; rank 1 fails after the 25th."""
    session = Session(folder / strategy, strategy=strategy)
    model = nn.Linear(2, 2)
    data = DataLoader(TensorDataset(torch.ones(128, 2)), batch_size=2)
    model, _, data = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), data)
    for _ in session.epochs(1):
        for step, (batch,) in enumerate(data):
            if step == 25 and RANK == CULPRIT:
                fails()
            loss = model(batch).square().sum()
            loss.item()
            session.step(loss)


def main(fault: str, timeout: str, folder: str, wait: str = "reading") -> None:
    global DATA, MORE, WHOLE, PAIR
    dist.init_dist("pytorch", timeout=float(timeout))
    DATA, MORE, WHOLE = ones(2), ones(3), ones(2, dtype=torch.int64)
    PAIR = torch_dist.new_group([0, 1])
    for _ in range(FIRST_CALLS):  # which are compared
        for call in (usual, *[FAULTS[name] for name in ("op", "dtype", "shape", "left out")]):
            call()
        if RANK < 2:
            FAULTS["other group"]()
    torch.accelerator.synchronize()
    dist.barrier()
    begun, found = time.monotonic(), Path(folder) / f"{RANK}.json"
    try:
        if fault.startswith(("ddp", "fsdp")):
            strategy, _, fault = fault.partition(", ")
            train(strategy, Path(folder), FAULTS[fault])
        FAULTS[fault]() if RANK == CULPRIT else usual()
        if fault == "order" and RANK != 1:
            dist.broadcast(DATA)
        while wait == "looping" and resolve().calls.failure is None:
            time.sleep(0.01)
        DATA.sum().item()
        if wait == "nothing":
            dist.destroy_dist()
        elif wait == "sleeping":
            time.sleep(100)
        else:
            dist.barrier()
    except DistError as error:
        found.write_text(json.dumps([type(error).__name__, str(error), time.monotonic() - begun]))
        raise


if __name__ == "__main__":
    simulator()
    torch.accelerator.set_device_index(RANK)
    main(*sys.argv[1:])
