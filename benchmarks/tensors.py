"""Tensor collectives against the bare calls of torch.distributed."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as torch_dist
from torch import Tensor

from benchmarks.measure import CheckMode, Contender, Row, compare, compare_modes
from lockstep import dist

SIZES = {"4 B": 1, "64 KiB": 2**14, "16 MiB": 2**22}
_ROUNDS = {"4 B": 300, "64 KiB": 200, "16 MiB": 60}
_CALLS = {"4 B": 20, "64 KiB": 5, "16 MiB": 1}
_BARE = "torch.distributed"
_LARGE: dict[CheckMode, str] = {"off": "<= 1.10", "sample": "<= 1.25"}
# By name and size: the goals under each mode of the checks. Others are measured without them, and have no goal.
_GOALS: dict[tuple[str, str], dict[CheckMode, str]] = {
    ("all_reduce", "4 B"): {"off": "<= 1.20", "sample": "<= 1.35", "always": ""},
    ("broadcast", "4 B"): {"off": "<= 1.20", "sample": "<= 1.35"},
    ("all_reduce", "64 KiB"): {**_LARGE, "always": ""},
    ("broadcast", "64 KiB"): _LARGE,
    ("all_reduce", "16 MiB"): _LARGE,
    ("broadcast", "16 MiB"): _LARGE,
    ("all_gather(x, uneven=False)", "64 KiB"): {"off": "<= 1.10", "sample": ""},
    ("all_gather(x), with a header", "64 KiB"): {"off": "", "sample": ""},
}


def rows() -> Iterator[Row]:
    for size, numel in SIZES.items():
        for name, (ours, theirs) in pairs(numel).items():
            counts = {"rounds": _ROUNDS[size], "calls": _CALLS[size]}
            case, group = f"{name}, {size}", "tensors"
            if goals := _GOALS.get((name, size)):
                yield from compare_modes(group, case, ours=ours, theirs=theirs, baseline=_BARE, goals=goals, **counts)
            else:
                yield compare(group, case, ours=ours, theirs=theirs, baseline=_BARE, **counts)


def pairs(numel: int, device: str = "cpu") -> dict[str, tuple[Contender, Contender]]:
    """Return calls of lockstep's and of torch's that do the same, by name, for float32 tensors."""
    world_size, rank = torch_dist.get_world_size(), torch_dist.get_rank()
    data = torch.zeros(numel, device=device)
    filled = [torch.zeros_like(data) for _ in range(world_size)]
    parts = [torch.zeros_like(data) for _ in range(world_size)]
    on_dst = filled if rank == 0 else None
    on_src = parts if rank == 0 else None

    def new() -> list[Tensor]:
        return [torch.empty_like(data) for _ in range(world_size)]

    def bare_all_gather() -> list[Tensor]:
        outputs = new()
        torch_dist.all_gather(outputs, data)
        return outputs

    return {
        "all_reduce": (lambda: dist.all_reduce(data), lambda: torch_dist.all_reduce(data)),
        "broadcast": (lambda: dist.broadcast(data), lambda: torch_dist.broadcast(data, 0)),
        "reduce": (lambda: dist.reduce(data), lambda: torch_dist.reduce(data, 0)),
        "all_gather(x, uneven=False)": (lambda: dist.all_gather(data, uneven=False), bare_all_gather),
        "all_gather(x), with a header": (lambda: dist.all_gather(data), bare_all_gather),
        "all_gather(list, x)": (
            lambda: dist.all_gather(filled, data),
            lambda: torch_dist.all_gather(filled, data),
        ),
        "gather": (lambda: dist.gather(data, on_dst, 0), lambda: torch_dist.gather(data, on_dst, 0)),
        "scatter": (lambda: dist.scatter(data, on_src), lambda: torch_dist.scatter(data, on_src)),
        "reduce_scatter": (
            lambda: dist.reduce_scatter(data, parts),
            lambda: torch_dist.reduce_scatter(data, parts),
        ),
        "all_to_all": (
            lambda: dist.all_to_all(filled, parts),
            lambda: torch_dist.all_to_all(filled, parts),
        ),
        **({} if numel > 1 else {"barrier": (lambda: dist.barrier(), lambda: torch_dist.barrier())}),
    }
