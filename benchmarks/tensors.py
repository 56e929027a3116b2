"""Tensor collectives against the bare calls of torch.distributed."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as torch_dist
from torch import Tensor

from benchmarks.measure import Contender, Row, compare
from lockstep import dist

SIZES = {"4 B": 1, "64 KiB": 2**14, "16 MiB": 2**22}
# Many short rounds: the best of them is one that nothing disturbed.
_ROUNDS = {"4 B": 300, "64 KiB": 200, "16 MiB": 80}
_CALLS = {"4 B": 20, "64 KiB": 5, "16 MiB": 1}
_GOALS = {"4 B": "<= 1.08", "64 KiB": "", "16 MiB": "<= 1.02"}


def rows() -> Iterator[Row]:
    for size, numel in SIZES.items():
        for name, (ours, theirs) in _pairs(numel).items():
            yield compare(
                f"tensors, {size}",
                name,
                ours=ours,
                theirs=theirs,
                baseline="torch.distributed",
                rounds=_ROUNDS[size],
                calls=_CALLS[size],
                goal=_GOALS[size],
            )


def _pairs(numel: int) -> dict[str, tuple[Contender, Contender]]:
    world_size, rank = torch_dist.get_world_size(), torch_dist.get_rank()
    data = torch.zeros(numel)
    filled = [torch.zeros(numel) for _ in range(world_size)]
    parts = [torch.zeros(numel) for _ in range(world_size)]
    on_dst = filled if rank == 0 else None
    on_src = parts if rank == 0 else None

    def new() -> list[Tensor]:
        return [torch.empty_like(data) for _ in range(world_size)]

    def bare_all_gather() -> list[Tensor]:
        outputs = new()
        torch_dist.all_gather(outputs, data)
        return outputs

    def bare_gather() -> list[Tensor] | None:
        outputs = new() if rank == 0 else None
        torch_dist.gather(data, outputs, dst=0)
        return outputs

    return {
        "all_reduce": (lambda: dist.all_reduce(data), lambda: torch_dist.all_reduce(data)),
        "reduce": (lambda: dist.reduce(data), lambda: torch_dist.reduce(data, 0)),
        "broadcast": (lambda: dist.broadcast(data), lambda: torch_dist.broadcast(data, 0)),
        "all_gather -> list": (lambda: dist.all_gather(data), bare_all_gather),
        "all_gather(list, x)": (
            lambda: dist.all_gather(filled, data),
            lambda: torch_dist.all_gather(filled, data),
        ),
        "gather -> list": (lambda: dist.gather(data), bare_gather),
        "gather(x, list)": (
            lambda: dist.gather(data, on_dst, 0),
            lambda: torch_dist.gather(data, on_dst, 0),
        ),
        "scatter": (
            lambda: dist.scatter(data, on_src),
            lambda: torch_dist.scatter(data, on_src),
        ),
        "reduce_scatter": (
            lambda: dist.reduce_scatter(data, parts),
            lambda: torch_dist.reduce_scatter(data, parts),
        ),
        "all_to_all": (
            lambda: dist.all_to_all(filled, parts),
            lambda: torch_dist.all_to_all(filled, parts),
        ),
        "barrier": (lambda: dist.barrier(), lambda: torch_dist.barrier()),
    }
