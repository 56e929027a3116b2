"""How long a call keeps the host from going on: collectives of lockstep beside torch's, on tensors of the device.

The device is idle when a round begins, and what it still has to do when the last call returns is not timed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median

import torch
import torch.distributed as torch_dist

from benchmarks.gpu.watch import settle
from benchmarks.measure import CheckMode, Contender, interleaved
from benchmarks.tensors import pairs
from lockstep import dist
from lockstep.device import get_device

SIZES = {"4 B": 1, "4 MiB": 2**20}
_MODES: tuple[CheckMode, ...] = ("off", "sample")
_TORCH = "torch"


@dataclass(frozen=True)
class Call:
    """Microseconds of the host per call, medians of the slowest rank: without checks, with `sample`, and torch's."""

    ranks: int
    name: str
    off: float
    sample: float
    torch: float

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


def calls(rounds: int) -> Iterator[Call]:
    """Time each call under two modes of the checks beside torch's, interleaved. **Collective**."""
    device = get_device()
    cases = {f"{name}, {size}": pair for size, numel in SIZES.items() for name, pair in pairs(numel, device).items()}
    cases |= {"all_reduce_dict of 20 scalars, beside 20 calls": _dict(device), "all_gather_object, 1 KiB": _objects()}
    modes = {mode: partial(dist.check_collectives, mode) for mode in _MODES}
    for name, (ours, theirs) in cases.items():
        spent = interleaved(
            {**dict.fromkeys(_MODES, ours), _TORCH: theirs}, rounds, calls=20, before=modes, settle=settle
        )
        dist.check_collectives("off")
        yield Call(dist.get_world_size(), name, *(median(spent[one]) * 1e6 for one in (*_MODES, _TORCH)))


def _dict(device: str) -> tuple[Contender, Contender]:
    scalars = {f"loss_{i}": torch.zeros((), device=device) for i in range(20)}
    return lambda: dist.all_reduce_dict(scalars), lambda: [torch_dist.all_reduce(x) for x in scalars.values()]


def _objects() -> tuple[Contender, Contender]:
    obj = {"features": torch.zeros(2**8), "name": "sample"}
    gathered: list[object] = [None] * dist.get_world_size()
    return lambda: dist.all_gather_object(obj), lambda: torch_dist.all_gather_object(gathered, obj)
