"""Trainings with random options, compared with a loop by hand: python -m tests.runner.soak_numbers --cases 300.

Each case is trained by a Runner or a Session on one to three real ranks, and by `by_hand`: plain torch, in one process,
on the global batches. Losses, norms of gradients, rates, metrics, records, averages and parameters must be the same.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from lockstep.testing import RankFailure
from lockstep.testing.pool import run_body

from ..soak import main
from .by_hand import by_hand
from .by_lockstep import by_lockstep
from .cases import drawn


def faults_in(found: Any, expected: Any, tolerance: float, where: str = "") -> Iterator[str]:
    if isinstance(expected, dict) and isinstance(found, dict):
        if found.keys() != expected.keys():
            yield f"{where}: {sorted(found)} for {sorted(expected)}"
            return
        for key, value in expected.items():
            yield from faults_in(found[key], value, tolerance, f"{where}.{key}")
    elif isinstance(expected, list) and isinstance(found, list):
        if len(found) != len(expected):
            yield f"{where}: {len(found)} for {len(expected)}: {found} for {expected}"[:600]
            return
        for number, (one, other) in enumerate(zip(found, expected, strict=True)):
            yield from faults_in(one, other, tolerance, f"{where}[{number}]")
    elif isinstance(expected, float) and isinstance(found, float | int | None):
        found = math.nan if found is None else found
        same = math.isnan(expected) and math.isnan(found)
        if not same and not abs(found - expected) <= tolerance * (1 + abs(expected)):
            yield f"{where}: {found} for {expected}"
    elif found != expected:
        yield f"{where}: {found} for {expected}"


def differences(seed: int, folder: Path) -> Iterator[str]:
    """Yield the first faults of a case, after its options."""
    case = drawn(seed)
    if found := [*compared(case, folder)]:
        yield from [str(case), *found[:6]]


def compared(case: dict[str, Any], folder: Path) -> Iterator[str]:
    """Yield how a training by lockstep differs from that by hand."""
    try:
        told = run_body(by_lockstep, (case, folder), {}, size=case["ranks"], warnings="default", timeout=120)
    except RankFailure as failure:
        yield f"{failure}"[:3000]
        return
    expected = by_hand(case)
    tolerance = 1e-9 if case["dtype"] == torch.float64 else 3e-4
    yield from faults_in(*recorded(case, told[0]["records"], expected), tolerance, "records")
    for rank, one in enumerate(told):
        trained = [
            {"iter": now["iter"], "rates": sorted(now["rates"]), "norms": now["norms"]} for now in expected["train"]
        ]
        for now in one["train"]:
            now["rates"] = sorted(now["rates"])
        yield from faults_in(one["train"], trained, tolerance, f"rank {rank}: train")
        names = {name for _, metrics in one["val"] for name in metrics}
        vals = [[at, {k: v for k, v in metrics.items() if k in names}] for at, metrics in expected["val"]]
        yield from faults_in(one["val"], vals, tolerance, f"rank {rank}: val")
        for key in ("final", "buffers"):
            yield from faults_in(one[key], expected[key], tolerance, f"rank {rank}: {key}")
        if one["average"] is not None:
            average = expected["average"] or expected["final"]
            if expected["average"]:
                yield from faults_in(one["average"], average, tolerance, f"rank {rank}: average")


def recorded(case: dict[str, Any], records: list[Any], expected: dict[str, Any]) -> tuple[list[Any], list[Any]]:
    """Return the records of iterations and epochs, and what they must be."""
    found, wanted = [], []
    names = expected["train"][0]["values"]
    for one in records:
        if one["mode"] != "train":
            continue
        found.append({"iter": one["iter"], **{name: one.get(name) for name in names}})
    begin = 0
    for end in [one["iter"] for one in found]:
        rows = [row for row in expected["train"] if begin <= row["iter"] < end and row["count"]]
        begin, count = end, sum(row["count"] for row in rows)
        means = {name: sum(row["values"][name] * row["count"] for row in rows) / (count or 1) for name in names}
        wanted.append({"iter": end, **(means if count else dict.fromkeys(names, math.nan))})
    return found, wanted


if __name__ == "__main__":
    sys.exit(main(__doc__, differences))
