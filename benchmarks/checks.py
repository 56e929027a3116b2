"""What the checks of calls cost: the same calls without a record, and under each mode of `check_collectives`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from statistics import median
from typing import Literal, cast

import torch
import torch.distributed as torch_dist
from torch import nn

from benchmarks.measure import Contender, Row, slowest
from lockstep import dist
from lockstep.groups import resolve

_MODES: tuple[Literal["off", "sample", "always"], ...] = ("off", "sample", "always")
_BARE = "without checks"
_GOALS = {"off": "<= 1.02", "sample": "<= 1.02", "always": "<= 1.5"}


def rows() -> Iterator[Row]:
    size = dist.get_world_size()
    data, large = torch.zeros(1), torch.zeros(2**18)
    output, entries = torch.zeros(1), [torch.zeros(1) for _ in range(size)]
    calls: dict[str, tuple[Contender, Contender]] = {
        "all_reduce of 4 B": (lambda: dist.all_reduce(data), lambda: torch_dist.all_reduce(data)),
        "reduce of 4 B": (lambda: dist.reduce(data), lambda: torch_dist.reduce(data, 0)),
        "reduce_scatter of 4 B": (
            lambda: dist.reduce_scatter(output, entries),
            lambda: torch_dist.reduce_scatter(output, entries),
        ),
        "all_reduce of 1 MiB": (lambda: dist.all_reduce(large), lambda: torch_dist.all_reduce(large)),
    }
    for name, (ours, theirs) in calls.items():
        many = {"rounds": 200, "calls": 20} if name.endswith("4 B") else {"rounds": 60, "calls": 5}
        yield from _compared(f"{name}, {size} ranks", ours, {"torch.distributed": theirs}, **many)
    yield from _compared(f"a training step, {size} ranks", _training_step(), {}, rounds=100, calls=5)


def _compared(case: str, call: Contender, others: Mapping[str, Contender], *, rounds: int, calls: int) -> Iterator[Row]:
    """Time a call under each mode, all in every round, in turning order. **Collective**."""
    contenders: dict[str, Callable[[], object]] = {_BARE: call, **dict.fromkeys(_MODES, call), **others}
    names = list(contenders)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(-2, rounds):
        for place in range(len(names)):
            name = names[(number + place) % len(names)]
            with _checked(name):
                torch_dist.barrier()
                start = time.perf_counter()
                for _ in range(calls):
                    contenders[name]()
                if number >= 0:
                    seconds[name].append((time.perf_counter() - start) / calls)
    spent = {name: slowest(times) for name, times in seconds.items()}
    for name in names[1:]:
        yield Row(
            "checks",
            f"{case}, {name}",
            _BARE,
            min(spent[name]),
            median(spent[name]),
            min(spent[_BARE]),
            median(spent[_BARE]),
            _GOALS.get(name, ""),
        )


@contextmanager
def _checked(name: str) -> Iterator[None]:
    comm = resolve()
    calls = comm.calls
    if name == _BARE:
        object.__setattr__(comm, "calls", None)
    elif name in _MODES:
        dist.check_collectives(cast(Literal["off", "sample", "always"], name))
    try:
        yield
    finally:
        object.__setattr__(comm, "calls", calls)
        dist.check_collectives("off")


def _training_step() -> Contender:
    """Return a step of a small model by hand; it averages the gradients, and the loss, by two collectives."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(384, 384), nn.ReLU(), nn.Linear(384, 384), nn.ReLU(), nn.Linear(384, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    inputs, targets = torch.randn(32, 384), torch.randint(0, 10, (32,))

    def step() -> None:
        loss = nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()
        dist.all_reduce_params([x.grad for x in model.parameters() if x.grad is not None], op="mean")
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss.detach(), "mean")

    return step
