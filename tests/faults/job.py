"""A job in which one rank fails: `python -m tests.faults.job PLACE FAULT TIMEOUT [DELAY]`.

`PLACES` is where it fails, `FAULTS` what it does there, FAILING which rank it is. Into the folder NOTES each rank notes
its process, the moment of the fault, and the error that it raises.
"""

from __future__ import annotations

import atexit
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as torch_dist
from torch import Tensor, nn
from torch.utils.data import Dataset

from lockstep.dist import all_reduce, barrier, destroy_dist, init_dist
from lockstep.evaluator import BaseMetric
from lockstep.groups import resolve
from lockstep.hooks import Hook
from lockstep.runner import Runner
from lockstep.strategy import build_strategy

from . import mismatch

LITTLE = 2**14  # bytes of a file that a rank without space may still write


def note(what: str, **more: object) -> None:
    """Note something with its time."""
    line = json.dumps({"what": what, "at": time.time(), **more}) + "\n"
    with Path(os.environ["NOTES"], f"rank_{os.environ['RANK']}").open("a") as file:
        file.write(line)


def meet() -> None:
    """Wait until all ranks have imported what they need: only then do timeouts of seconds begin."""
    folder = Path(os.environ["NOTES"])
    (folder / f"here_{os.environ['RANK']}").touch()
    while len(list(folder.glob("here_*"))) < int(os.environ["WORLD_SIZE"]):
        time.sleep(0.01)


# What the rank does.


def fail() -> None:
    raise ValueError("boom")


def fail_slowly() -> None:
    atexit.register(time.sleep, 1)
    fail()


def loop_for_ever() -> None:
    while True:
        pass


def be_deaf() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(1000)


def send(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


def use_up_memory() -> None:
    held = []
    while True:
        held.append(torch.ones(2**22))


def use_up_a_share() -> None:
    """Allocate in a control group with little memory, until the kernel kills this process."""
    Path(os.environ["FAULTS_GROUP"], "cgroup.procs").write_text(str(os.getpid()))
    use_up_memory()


def use_up_addresses() -> None:
    """Allocate until the limit of this process."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**28, resource.RLIM_INFINITY))
    use_up_memory()


def refuse_files() -> None:
    """Let no file of this process grow, as a disk that is full for this rank alone."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (LITTLE, resource.RLIM_INFINITY))


def fill_disk() -> None:
    """Leave no space on the disk of all ranks."""
    with suppress(OSError), Path(os.environ["DISK"], "filling").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


def unplug() -> None:
    """Take this host, a network namespace, from the network."""
    subprocess.run(["ip", "link", "set", "eth0", "down"], check=True)


FAULTS: dict[str, Callable[[], object]] = {
    "raises": fail,
    "raises and ends slowly": fail_slowly,
    "leaves its group": destroy_dist,
    "exits with 3": lambda: sys.exit(3),
    "exits with 0": lambda: sys.exit(0),
    "os._exit(0)": lambda: os._exit(0),
    "aborts": os.abort,
    "SIGKILL": partial(send, signal.SIGKILL),
    "SIGTERM": partial(send, signal.SIGTERM),
    "SIGSTOP": partial(send, signal.SIGSTOP),
    "endless loop": loop_for_ever,
    "deaf to SIGTERM": be_deaf,
    "memory of its control group": use_up_a_share,
    "memory by RLIMIT_AS": use_up_addresses,
    "no space for it": refuse_files,
    "no space": fill_disk,
    "unreachable": unplug,
}


class Place:
    """Where one rank fails.

    Args:
        name: a key of `PLACES`.
        fault: a key of `FAULTS`.
        delay: seconds before.
    """

    def __init__(self, name: str, fault: str, delay: float = 0.0) -> None:
        self.name, self.fault, self.delay = name, fault, delay

    def reached(self, name: str) -> None:
        """Fail, if this is the place, on the rank FAILING; ALSO is what the rank after it does meanwhile."""
        if name != self.name:
            return
        rank, failing = int(os.environ["RANK"]), int(os.environ["FAILING"])
        if rank == failing:
            time.sleep(self.delay)
            note("fault")
            FAULTS[self.fault]()
        elif rank == failing + 1 and "ALSO" in os.environ:
            FAULTS[os.environ["ALSO"]]()

    def meets_others(self) -> None:
        """Note that the next call does not fit those of the others; on the rank in question, after the delay."""
        if os.environ["RANK"] == os.environ["FAILING"]:
            time.sleep(self.delay)
        note("fault")


def collective(place: Place) -> None:
    barrier()
    subprocess.Popen(["sleep", "1000"])  # in each rank, as a data loader's worker
    place.reached("all_reduce")
    all_reduce(torch.ones(100_000))


def collective_of_torch(place: Place) -> None:
    torch_dist.barrier()
    place.reached("a script without lockstep")
    torch_dist.all_reduce(torch.ones(100_000))


class InBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, act: Callable[[], None]) -> Tensor:
        ctx.act = act
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.act()
        return gradient, None


class Net(nn.Module):
    """Its checkpoints have more than a megabyte."""

    def __init__(self, place: Place) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.place, self.passes = place, 0
        self.first, self.last = nn.Linear(8, 8192), nn.Linear(8192, 8)

    def forward(self, x: Tensor, mode: str = "tensor") -> Tensor:
        self.passes += 1
        out = self.first(x)
        if self.passes == 3:
            for strategy in ("DDP", "FSDP"):
                out = InBackward.apply(out, partial(self.place.reached, f"{strategy}'s backward pass"))
        return self.last(out) if mode == "predict" else self.last(out).square().mean()


def steps(strategy: str, place: Place) -> None:
    model = Net(place)
    wrapped, optim_wrapper = build_strategy(strategy).prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(5):
        optim_wrapper.update_params(wrapped(torch.ones(2, 8)))


class Rows(Dataset):
    def __init__(self, place: Place) -> None:
        self.place = place

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Tensor:
        if index >= 32:
            self.place.reached("worker of a data loader")
        return torch.ones(8)


class AtPlace(Hook):
    def __init__(self, place: Place) -> None:
        self.place = place

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None) -> None:
        if runner.iter == 2:
            self.place.reached("hook")

    def before_save_checkpoint(self, runner, checkpoint) -> None:
        self.place.reached("save")


class Mean(BaseMetric):
    def __init__(self, place: Place) -> None:
        super().__init__()
        self.place = place

    def process(self, data_batch: Any, data_samples: Any) -> None:
        self.place.reached("process of a metric")
        self.results.append(1.0)

    def compute_metrics(self, results: list[Any]) -> dict[str, Any]:
        self.place.reached("compute_metrics")
        return {"mean": sum(results) / len(results)}


def training(place: Place) -> None:
    """Train for an epoch: 64 samples, 8 of them on each rank in every iteration; validate and save at its end."""
    workers = 1 if place.name == "worker of a data loader" else 0
    loader = {
        "dataset": Rows(place),
        "batch_size": 2,
        "num_workers": workers,
        "sampler": {"type": "DefaultSampler", "shuffle": False},
    }
    Runner(
        Net(place), os.environ.get("DISK", "work"), train_dataloader=loader, strategy="ddp",
        val_dataloader={"dataset": Rows(place), "batch_size": 8}, val_evaluator=Mean(place),
        train_cfg={"max_epochs": 1, "val_interval": 1}, optim_wrapper={"optimizer": {"type": "SGD", "lr": 0.001}},
        custom_hooks=[AtPlace(place)], default_hooks={"progress": None}, visualizer=[], log_level="WARNING",
    ).train()  # fmt: skip


class Running:
    """What tells that a call on a device is incomplete, for ever."""

    def is_completed(self) -> bool:
        return False


def on_a_device(place: Place) -> None:
    """Queue a call, as on a device, and go on; with STUCK, be blocked by the device instead."""
    barrier()
    place.reached("a call on a device")
    calls = resolve().calls
    assert calls is not None

    def queue() -> None:
        calls.add("all_reduce", (torch.ones(100_000), "sum"))
        calls.running = (calls.number, time.monotonic(), Running())

    queue()
    while calls.failure is None:
        time.sleep(1000 if "STUCK" in os.environ else 0.01)
    all_reduce(torch.ones(100_000))


PLACES: dict[str, Callable[[Place], None]] = {
    "all_reduce": collective,
    "a script without lockstep": collective_of_torch,
    "a call on a device": on_a_device,
    "DDP's backward pass": partial(steps, "ddp"),
    "FSDP's backward pass": partial(steps, "fsdp"),
    "worker of a data loader": training,
    "hook": training,
    "process of a metric": training,
    "compute_metrics": training,
    "save": training,
    "calls": lambda place: mismatch.run(place.fault, 15, place.meets_others),
}


def main(name: str, fault: str, timeout: str, delay: str = "0") -> None:
    """Join the ranks, and do what `PLACES` says."""
    note("begins", pid=os.getpid())
    meet()
    try:
        if name == "a script without lockstep":
            torch_dist.init_process_group("gloo", timeout=timedelta(seconds=float(timeout)))
        else:
            init_dist("pytorch", timeout=float(timeout))
        PLACES[name](Place(name, fault, float(delay)))
        destroy_dist()
    except BaseException as error:
        note("raised", kind=type(error).__name__, text=str(error))
        raise


if __name__ == "__main__":
    main(*sys.argv[1:])
