"""What the ranks of a counted job do: calls of lockstep, or their counterparts of torch; or one of them fails.

What is counted lies between two moments at which all ranks meet without sending anything.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as torch_dist
from torch import nn
from torch.distributed import PrefixStore, TCPStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import TensorDataset

from benchmarks.scale.sockets import Counts
from lockstep import Runner, dist
from lockstep.dist.objects import start_gather_bytes
from lockstep.errors import Preempted
from lockstep.groups import resolve
from lockstep.hooks import Hook
from lockstep.runner.preemption import Agreement
from lockstep.transport.control import exchange

FAILING = 1  # the rank that fails
FAULT, RAISED = 1, 2  # what ranks stamp
_WARM = 30  # calls after which ranks compare new calls only
SECONDS_AT_REST = 2.0
_SECONDS_LATE = 1.0  # of one rank at the end

CALLS = (
    "init_dist", "exchange", "all_gather_object", "gather_object", "collect_results", "all_reduce_dict",
    "a small all_reduce", "a record to rank 0", "barrier", "at rest, a second", "a Runner's start",
    "agreement on a stop", "destroy_dist",
)  # fmt: skip
QUICK_FAULTS = ("one rank killed", "one rank with another call")
FAULTS = (*QUICK_FAULTS, "one rank stopped")


class Job:
    """One rank of a counted job.

    Args:
        counts: those of all processes.
        rank: this one.
        folder: where the ranks run.
        timeout: seconds of a collective.
    """

    def __init__(self, counts: Counts, rank: int, folder: Path, timeout: float) -> None:
        self.counts, self.rank, self.folder, self.timeout = counts, rank, folder, timeout
        self._met = 0

    @contextmanager
    def counted(self, what: str) -> Iterator[None]:
        """Count what is sent inside."""
        self.begin(what)
        with _CountCalls(lambda: self.counts.add_call(self.rank)):
            yield
        self.end(what)

    def begin(self, what: str) -> None:
        """Count from here on."""
        self.meet()
        self._note(moments(what)[0])
        self.meet()

    def end(self, what: str) -> None:
        """Count up to here."""
        self.meet()
        self._note(moments(what)[1])

    def _note(self, moment: int) -> None:
        self.counts.note(self.rank, moment)
        if self.rank == 0:
            self.counts.note(self.counts.processes - 1, moment)  # the store's

    def meet(self) -> None:
        self._met += 1
        self.counts.meet(self.rank, self._met)


def moments(what: str) -> tuple[int, int]:
    """Return the numbers of the moments between which something is counted."""
    place = CALLS.index(what) if what in CALLS else 0
    return 2 * place, 2 * place + 1


class _CountCalls(TorchDispatchMode):
    """Tells of each collective that torch begins on this thread."""

    def __init__(self, tell: Callable[[], None]) -> None:
        super().__init__()
        self._tell = tell

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self._tell()
        return func(*args, **(kwargs or {}))


class _Counted(Hook):
    """Ends the count of a Runner's start, before the first iteration."""

    def __init__(self, end: Callable[[], None]) -> None:
        self._end = end

    def before_train_iter(self, runner, batch_idx, data_batch=None) -> None:
        if runner.iter == 0:
            self._end()


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))


def calls(job: Job) -> None:
    """Count calls that succeed."""
    with job.counted("init_dist"):
        dist.init_dist("pytorch", timeout=600)
    size = dist.get_world_size()
    counted: dict[str, Callable[[], object]] = {
        "exchange": lambda: exchange(resolve()),
        "all_gather_object": lambda: dist.all_gather_object("x" * job.rank),
        "gather_object": lambda: dist.gather_object("x" * job.rank),
        "collect_results": lambda: dist.collect_results(["x" * job.rank], size),
        "all_reduce_dict": lambda: dist.all_reduce_dict({"loss": torch.ones(()), "accuracy": torch.ones(())}),
        "a small all_reduce": lambda: dist.all_reduce(torch.ones(4)),
        "a record to rank 0": lambda: start_gather_bytes(bytes(400)).wait(),
        "barrier": dist.barrier,
    }
    for call in counted.values():
        call()
    for _ in range(_WARM):
        dist.barrier()
    for what, call in counted.items():
        with job.counted(what):
            call()
    with job.counted("at rest, a second"):
        time.sleep(SECONDS_AT_REST)
    _train(job)
    _agree(job)
    job.begin("destroy_dist")
    if job.rank == FAILING:
        time.sleep(_SECONDS_LATE)
    dist.destroy_dist()
    job.end("destroy_dist")


def _train(job: Job) -> None:
    data = TensorDataset(torch.ones(4 * dist.get_world_size(), 8), torch.ones(4 * dist.get_world_size(), 1))
    job.begin("a Runner's start")
    counting = _CountCalls(lambda: job.counts.add_call(job.rank))
    with counting:
        runner = Runner(
            _net(), job.folder / "work", loss=nn.MSELoss(), strategy="ddp", randomness={"seed": 1},
            train_dataloader={"dataset": data, "batch_size": 2, "num_workers": 0},
            train_cfg={"max_epochs": 1}, optim_wrapper={"optimizer": {"type": "SGD", "lr": 0.1}},
            custom_hooks=[_Counted(lambda: job.end("a Runner's start"))],
            default_hooks={"progress": None, "checkpoint": None}, visualizer=[], log_level="WARNING",
        )  # fmt: skip
        runner.train()


def _agree(job: Job) -> None:
    agreement = Agreement()
    with agreement.opened():
        job.begin("agreement on a stop")
        if job.rank == 0:
            agreement.ask("counted")
        with suppress(Preempted):
            while True:
                agreement.stop_if_asked()
                time.sleep(0.01)
        job.end("agreement on a stop")


def calls_of_torch(job: Job) -> None:
    """Count what torch has in the place of these calls."""
    with job.counted("init_dist"):
        store = TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False, wait_for_workers=False)
        size = int(os.environ["WORLD_SIZE"])
        torch_dist.init_process_group("gloo", store=PrefixStore("bare", store), rank=job.rank, world_size=size)
    places = [None] * size
    gathered = places if job.rank == 0 else None
    counted: dict[str, Callable[[], object]] = {
        "exchange": lambda: torch_dist.all_gather_into_tensor(
            torch.empty(256 * size, dtype=torch.uint8), torch.ones(256, dtype=torch.uint8)
        ),
        "all_gather_object": lambda: torch_dist.all_gather_object(places, "x" * job.rank),
        "gather_object": lambda: torch_dist.gather_object("x" * job.rank, gathered),
        "collect_results": lambda: torch_dist.gather_object(["x" * job.rank], gathered),
        "all_reduce_dict": lambda: torch_dist.all_reduce(torch.ones(2)),
        "a small all_reduce": lambda: torch_dist.all_reduce(torch.ones(4)),
        "a record to rank 0": lambda: torch_dist.gather_object(bytes(400), gathered),
        "barrier": torch_dist.barrier,
    }
    for call in counted.values():
        call()
    for what, call in counted.items():
        with job.counted(what):
            call()
    with job.counted("a Runner's start"):
        nn.parallel.DistributedDataParallel(_net())
    job.begin("destroy_dist")
    torch_dist.destroy_process_group()
    job.end("destroy_dist")


def fault(job: Job, what: str) -> None:
    """Let one rank fail while the others wait for it."""
    dist.init_dist("pytorch", timeout=timedelta(seconds=job.timeout))
    for _ in range(_WARM):
        dist.barrier()
    job.begin(what)
    job.counts.stamp(job.rank, FAULT)
    if job.rank == FAILING and what == "one rank killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if job.rank == FAILING and what == "one rank stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    op = "max" if job.rank == FAILING and what == "one rank with another call" else "sum"
    dist.all_reduce(torch.ones(100_000), op)
    raise AssertionError("no rank may get here")


def run(job: Job, name: str) -> None:
    """Run a job; `name` is `lockstep`, `torch` or one of FAULTS."""
    if name in FAULTS:
        fault(job, name)
    elif name == "torch":
        calls_of_torch(job)
    else:
        calls(job)
