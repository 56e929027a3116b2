"""What the simulator itself does, by torch alone: each rule on two ranks, and what it gives on either.

Usage: rules.py NAME RANK FOLDER, where NAME is a function of this file; it writes what that returns as JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import FileStore, ProcessGroup
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parent))

from sim import counts, simulator

RANK = int(sys.argv[2]) if len(sys.argv) > 2 else 0
OTHER = 1 - RANK


def on(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float32).to("sim")


def queued() -> list[object]:
    """Rank 0 goes on beyond collectives that rank 1 has not begun, until it reads a value."""
    data, later = on(1 + RANK), torch.Event("sim")
    begins = store().wait if RANK == 1 else lambda keys: None
    begins(["go on"])
    answer = dist.all_reduce(data)
    work = dist.all_reduce(data, async_op=True)
    waited = work.wait()
    double = data * 2
    later.record()
    seen = [answer, work.is_completed(), waited, later.query(), list(double.shape)]
    if RANK == 0:
        store().set("go on", "")
    return [*(seen if RANK == 0 else []), double.item(), work.is_completed(), later.query()]


def early() -> list[object]:
    """What is read too early is no result: on the host, and in another stream."""
    data, host, event = on(1 + RANK), torch.zeros(1).pin_memory(), torch.Event("sim")
    host.copy_(data, non_blocking=True)
    event.record()
    seen = [host.isnan().item()]
    event.synchronize()
    seen.append(host.item())
    work = dist.all_reduce(data, async_op=True)
    seen.append((data != 3).item())
    work.wait()
    with torch.Stream("sim"):
        batch = torch.ones(1).pin_memory().to("sim", non_blocking=True)
    seen.append(batch.isnan().item())
    return [*seen, data.item()]


def futures() -> list[object]:
    data = on(1 + RANK)
    future = dist.all_reduce(data, async_op=True).get_future()
    doubled = future.then(lambda done: done.value()[0] * 2)
    return [future.done(), future.wait()[0].item(), doubled.wait().item()]


def events() -> list[object]:
    first, last = (torch.sim.Event(enable_timing=True) for _ in range(2))
    first.record()
    dist.all_reduce(on(1))
    last.record()
    last.synchronize()
    return [first.query(), last.query(), first.elapsed_time(last) > 0]


def _called(call: Callable[[], Any]) -> dict[str, int]:
    """Return which collectives a call begins, and how often it waits."""
    before = counts()
    call()
    return {name: number for name, number in (counts() - before).items() if name != "bytes"}


def collectives() -> dict[str, tuple[Any, dict[str, int]]]:
    """Each collective: what it gives, and as what it is counted."""
    found: dict[str, tuple[Any, dict[str, int]]] = {}

    def add(name: str, result: Tensor | list[Tensor], call: Callable[[], Any]) -> None:
        counted = _called(call)
        found[name] = ([x.tolist() for x in result] if isinstance(result, list) else result.tolist(), counted)

    own, pair, two, empty = on(1 + RANK), on(0, 0), on(10 * RANK, 10 * RANK + 1), on(0)
    equal, uneven, parts = [on(0), on(0)], [on(0), on(0, 0)], [on(5), on(6)]
    add("broadcast", x := on(1 + RANK), lambda: dist.broadcast(x, 1))
    add("all_reduce", y := on(1 + RANK), lambda: dist.all_reduce(y, dist.ReduceOp.AVG))
    add("reduce", z := on(1 + RANK), lambda: dist.reduce(z, 1))
    add("all_gather", equal, lambda: dist.all_gather(equal, own))
    add("all_gather, uneven", uneven, lambda: dist.all_gather(uneven, own.repeat(1 + RANK)))
    add("all_gather_into_tensor", pair, lambda: dist.all_gather_single(pair, own))
    add("gather", equal, lambda: dist.gather(own, equal if RANK == 1 else None, 1))
    add("scatter", x, lambda: dist.scatter(x, parts if RANK == 0 else None, 0))
    add("reduce_scatter", x, lambda: dist.reduce_scatter(x, [own, own * 2]))
    add("reduce_scatter_tensor", x, lambda: dist.reduce_scatter_single(x, two))
    add("all_to_all_single", pair, lambda: dist.all_to_all_single(pair, two))
    y = on(*[0] * (1 + 2 * RANK))
    splits = [2 * RANK, 1], [RANK, 2 - RANK]
    add("all_to_all_single, uneven", y, lambda: dist.all_to_all_single(y, own.repeat(2), *splits))
    add("all_to_all", equal, lambda: dist.all_to_all(equal, list(two.split(1))))
    add("barrier", empty, dist.barrier)

    def exchange() -> None:
        ops = [dist.P2POp(dist.isend, own, OTHER), dist.P2POp(dist.irecv, empty, OTHER)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()

    add("batch_isend_irecv", empty, exchange)
    add("send, recv", z, lambda: dist.send(own, 1) if RANK == 0 else dist.recv(z, 0))

    def coalesced() -> None:
        with dist._coalescing_manager():
            dist.all_reduce(own)
            dist.all_reduce(two)

    add("coalesced all_reduce", [own, two], coalesced)
    return found


def refused() -> list[str]:
    said = []
    bits, short = torch.ones(1, dtype=torch.int64), torch.ones(1, dtype=torch.int16)
    for data, op in [
        (bits.to("sim"), dist.ReduceOp.BOR),
        (short.to("sim"), dist.ReduceOp.SUM),
        (torch.ones(2, 2).to("sim").t(), dist.ReduceOp.SUM),
        (torch.ones(1), dist.ReduceOp.SUM),
    ]:
        try:
            dist.all_reduce(data, op)
        except (RuntimeError, ValueError) as error:
            said.append(str(error).splitlines()[0])
    return said


@contextmanager
def hung(group: ProcessGroup, name: str, found: dict[str, Any]) -> Iterator[None]:
    """Queue calls in a group that never complete; then abort it."""
    yield
    event = torch.Event("sim")
    event.record()
    time.sleep(0.3)
    found[name] = event.query()
    store().add(f"aborts {name}", 1)
    while store().add(f"aborts {name}", 0) < 2:  # gloo would tell the other rank
        time.sleep(0.01)
    group.abort()
    event.synchronize()


def mismatches() -> dict[str, Any]:
    """Whether calls that differ are complete before the group is aborted; and what is said after that."""
    found: dict[str, Any] = {}
    one, two, whole = on(1), on(1, 2), on(1).long()  # made before, as copies to the device wait
    calls: dict[str, list[Callable[[ProcessGroup], Any]]] = {
        "op": [lambda group: dist.all_reduce(one, group=group), lambda group: dist.broadcast(one, 0, group=group)],
        "dtype": [lambda group: dist.all_reduce(one, group=group), lambda group: dist.all_reduce(whole, group=group)],
        "size": [lambda group: dist.all_reduce(one, group=group), lambda group: dist.all_reduce(two, group=group)],
        "order": [lambda group: dist.all_reduce(two, group=group), lambda group: dist.all_reduce(one, group=group)],
        "left out": [lambda group: dist.broadcast(one, 0, group=group), lambda group: None],
    }
    for name, call in calls.items():
        with hung(group := dist.new_group(), name, found):
            call[RANK](group)
            work = dist.all_reduce(one if name != "order" or RANK == 0 else two, group=group, async_op=True)
            work.wait()
        if name == "left out":
            try:
                dist.all_reduce(one, group=group)
            except dist.DistBackendError as error:
                found["a call after the abort"] = str(error).splitlines()[0]
            try:
                work.wait()
            except dist.DistBackendError as error:
                found["a wait after the abort"] = str(error).splitlines()[0]
    dist.all_reduce(data := on(1 + RANK))
    found["the others"] = data.item()
    return found


def groups() -> list[object]:
    """Subgroups, of a mesh of two dimensions, too."""
    mesh = dist.init_device_mesh("sim", (2, 1), mesh_dim_names=("data", "model"))
    alone, both = on(1 + RANK), on(1 + RANK)
    dist.all_reduce(alone, group=mesh.get_group("model"))
    dist.all_reduce(both, group=mesh.get_group("data"))
    return [alone.item(), both.item(), dist.get_backend(mesh.get_group("data"))]


def devices() -> list[object]:
    """A model over two devices of each process: its gradients are those of one device."""
    torch.manual_seed(0)
    first, second = (f"sim:{2 * RANK + one}" for one in range(2))
    parts = [nn.Linear(2, 3), nn.Linear(3, 1)]

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = parts[0].to(first), parts[1].to(second)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x).to(second)).sum()

    inputs = torch.arange(4.0).view(2, 2)
    whole = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    whole[0].load_state_dict(parts[0].state_dict())
    whole[1].load_state_dict(parts[1].state_dict())
    model = DistributedDataParallel(Both())
    model(inputs[RANK : RANK + 1].to(first)).backward()
    whole(inputs).sum().backward()
    pairs = zip(model.parameters(), whole.parameters(), strict=True)
    return [all(torch.allclose(2 * x.grad.cpu(), y.grad.cpu()) for x, y in pairs)]


def all_rules() -> dict[str, Any]:
    rules = (queued, early, futures, events, collectives, refused, mismatches, groups, devices)
    return {rule.__name__: rule() for rule in rules}


def late() -> None:
    """A call that rank 1 leaves out lasts for longer than the group's timeout, of a second."""
    if RANK == 1:
        time.sleep(2)
        return
    dist.all_reduce(on(1))
    torch.accelerator.synchronize()


def dead() -> list[object]:
    """A rank is gone: nothing is said, and nothing completes."""
    dist.all_reduce(on(1))
    torch.accelerator.synchronize()
    if RANK == 1:
        os._exit(0)
    dist.all_reduce(data := on(1))
    event = torch.Event("sim")
    event.record()
    time.sleep(0.5)
    hangs = not event.query()
    dist.group.WORLD.abort()
    event.synchronize()
    return [hangs, data.isnan().item()]


def forked() -> list[object]:
    """A forked child can't use the device."""
    data = on(1)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            data.add_(1)
        except RuntimeError as error:
            status = 7 if "forked" in str(error) else 2
        os._exit(status)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), torch.sim._is_in_bad_fork()]


def store() -> FileStore:
    return FileStore(str(Path(sys.argv[3]) / "store"), 2)


if __name__ == "__main__":
    os.environ["SIM_LATENCY"] = "20000"  # microseconds, so that what reads too early does
    simulator()
    torch.accelerator.set_device_index(RANK)
    name = sys.argv[1]
    timeout = timedelta(seconds=1 if name == "late" else 60)
    dist.init_process_group("sim:simccl", store=store(), rank=RANK, world_size=2, timeout=timeout)
    result = globals()[name]()
    (Path(sys.argv[3]) / f"{name}_{RANK}.json").write_text(json.dumps(result))
    if name == "all_rules":
        dist.destroy_process_group()
    else:
        os._exit(0)
