"""Objects that hold tensors, against torch's object collectives; also what memory they take at the peak."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as torch_dist

from benchmarks.measure import Row, compare
from lockstep import dist

_CASES = {
    "1 KiB": (2**8, 150, 20, "<= 1.0"),
    "1 MiB": (2**18, 60, 2, ""),
    "16 MiB": (2**22, 30, 1, "<= 0.35"),
    "100 MiB": (25 * 2**20, 7, 1, ""),
}


def rows() -> Iterator[Row]:
    for size, (numel, rounds, calls, goal) in _CASES.items():
        obj = {"features": torch.zeros(numel), "name": "sample"}

        def bare(obj: object = obj) -> list[object]:
            gathered: list[object] = [None] * torch_dist.get_world_size()
            torch_dist.all_gather_object(gathered, obj)
            return gathered

        yield compare(
            "objects",
            f"all_gather_object, {size}",
            ours=lambda obj=obj: dist.all_gather_object(obj),
            theirs=bare,
            baseline="torch.distributed",
            rounds=rounds,
            calls=calls,
            goal=goal,
            memory=numel >= 2**22,
        )
