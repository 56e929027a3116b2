"""collect_results against the usual way: every rank pickles its part into a shared folder, and rank 0 reads all."""

from __future__ import annotations

import pickle
import shutil
import tempfile
from collections.abc import Iterator
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

import torch
import torch.distributed as torch_dist

from benchmarks.measure import Row, compare
from lockstep import dist


def rows() -> Iterator[Row]:
    cases = {
        "50,000 small dicts": (50_000, _dict, 12, "<= 1"),
        "4,000 x two small tensors": (4_000, _boxes, 12, "<= 1/6"),
        "400 masks of 512 x 512": (400, _mask, 12, "<= 1/3"),
    }
    for name, (size, make, rounds, goal) in cases.items():
        part = [make(i) for i in range(torch_dist.get_rank(), size, torch_dist.get_world_size())]
        yield compare(
            "results",
            f"collect_results, {name}",
            ours=lambda part=part, size=size: dist.collect_results(part, size),
            theirs=lambda part=part, size=size: collect_through_folder(part, size),
            baseline="pickle in a shared folder",
            rounds=rounds,
            goal=goal,
        )


def collect_through_folder(part: list[Any], size: int) -> list[Any] | None:
    """Collect as evaluation code commonly does it."""
    rank, world_size = torch_dist.get_rank(), torch_dist.get_world_size()
    names = [tempfile.mkdtemp(prefix="bench-results-") if rank == 0 else None]
    torch_dist.broadcast_object_list(names, src=0)
    folder = Path(str(names[0]))
    with (folder / f"part_{rank}.pkl").open("wb") as file:
        pickle.dump(part, file, protocol=2)
    torch_dist.barrier()
    if rank != 0:
        return None
    parts = []
    for other in range(world_size):
        with (folder / f"part_{other}.pkl").open("rb") as file:
            parts.append(pickle.load(file))
    shutil.rmtree(folder)
    return list(chain.from_iterable(zip_longest(*parts)))[:size]


def _dict(index: int) -> dict[str, Any]:
    return {"image_id": index, "category": index % 80, "score": index / 50_000, "name": f"img_{index:06d}"}


def _boxes(index: int) -> dict[str, Any]:
    return {"boxes": torch.full((10, 4), float(index)), "scores": torch.rand(10)}


def _mask(index: int) -> torch.Tensor:
    return torch.full((512, 512), index % 2 == 0)
