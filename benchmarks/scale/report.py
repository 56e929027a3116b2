"""What was counted as a page, and what grows with the square of the number of ranks though it need not."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import torch

from benchmarks.page import table
from benchmarks.scale import ranks
from benchmarks.scale.jobs import PER_NODE, Outcome
from benchmarks.scale.laws import Law, law_of

FAR = (1024, 16384)
KINDS = {
    "requests": "Requests at the store, of all ranks together",
    "writes": "Messages between ranks, of all together",
    "bytes": "Bytes that all ranks and the store send",
    "busiest": "Bytes that the busiest rank sends",
    "calls": "What the busiest rank starts by `torch.distributed`",
}
# In all, these may grow with the square: what each rank gets of each, and gloo's connections of each with each.
_BY_NATURE = {
    "exchange": ("writes", "bytes"),
    "all_gather_object": ("writes", "bytes"),
    "init_dist": ("writes", "bytes"),
}
# What torch itself does in these is not lockstep's: gloo meets through the store, DDP compares shapes.
_BESIDE_TORCH = ("init_dist", "a Runner's start", "destroy_dist")
_TIMED = ("at rest, a second", "agreement on a stop", "destroy_dist", *ranks.FAULTS)
_NOISE, _NOISE_OF_TIMED = 0.04, 0.15
_MANY = 9  # ranks: fewer tell each other what they must by one call of gloo's, whose messages are n^2

_HEAD = """# How it grows with the number of ranks

`make bench-scale` counts what all processes of a job send, on {sizes} ranks of one machine (torch {torch}, gloo,
on the CPU, nodes of {per_node} ranks), and writes this page. It fails if what lockstep adds grows with the square of
the number of ranks.

- *Counted*: each write to a socket, by Python or C++, in a library that is loaded before libc. A write to the store is
  a request. A process of its own serves the store, as under `lockstep launch`. What the watch asks at rest has a row of
  its own. In the rows of faults is all that goes to the store and back, from the fault to the end.
- *law*: of 1, log n, n, n log n and n^2 (with lower terms), fitted to the counts of more than 8 ranks by least squares:
  the slowest that is right to within {noise:.0%}, or {timed:.0%} where counts depend on time. The columns after it are
  what the law says. Up to 8 ranks, hosts tell each other all by one call of gloo's, whose messages are n^2.
- *torch*: the same by `torch.distributed` alone at {largest} ranks, and its law: `init_process_group`; `gather_object`
  of a result or a record; `DistributedDataParallel(...)` for a Runner's start; `all_reduce` of a vector for a dict;
  `all_gather_into_tensor` of 256 bytes for an exchange.

Some sums over all ranks may grow with the square: what each rank gets of each, whoever carries it, and in `init_dist`
gloo's connections of each rank with each, as for torch alone. There only the busiest rank is judged. Of a Runner's
start, `init_dist` and `destroy_dist`, only what is more than torch's own is judged.
"""

_CHECKPOINTS = """One process stands for all ranks: it plans what they would save of a model that is sharded as FSDP
does it, and what one would load. Before
[decision 38](decisions/0038-plans-and-manifests-for-a-thousand-ranks.md), that took minutes. Orders of up to 10^10
samples are in [Data](data.md).
"""
_OF_CHECKPOINTS = {
    "describe_s": "a rank describes its part",
    "plan_s": "rank 0 plans",
    "again_s": "where the plan holds",
    "first_bytes": "bytes of a rank",
    "again_bytes": "where it holds",
    "manifest_bytes": "bytes of the manifest",
    "write_s": "written in",
    "read_s": "read and checked in",
    "load_s": "a load is planned in",
    "load_files": "files that a rank then reads",
}


def figures_of(name: str, outcome: Outcome) -> list[dict[str, Any]]:
    """Return the figures of a job, one dict for each thing that was counted."""
    rows = []
    for what, sent in outcome.sent.items():
        *own, store = sent
        if name in ranks.FAULTS:  # between the ranks goes what the call sends in which they wait
            own = [one._replace(writes=0, write_bytes=0) for one in own]
        row: dict[str, Any] = {"by": "torch" if name == "torch" else "lockstep", "what": what, "ranks": outcome.size}
        row["requests"] = sum(one.requests for one in own)
        row["writes"] = sum(one.writes for one in own)
        row["bytes"] = sum(one.bytes for one in own) + store.reply_bytes * (what in _TIMED)
        row["busiest"] = max(one.bytes for one in own)
        row["calls"] = max(one.calls for one in own)
        row["files"] = own[0].files
        if what == "at rest, a second":
            row |= {kind: round(row[kind] / ranks.SECONDS_AT_REST) for kind in KINDS}
        if name in ranks.FAULTS:
            row |= {"codes": outcome.codes, "seconds": outcome.seconds, "named": _named(name, outcome)}
        rows.append(row)
    return rows


def _named(name: str, outcome: Outcome) -> int:
    """Return on how many of the ranks that should raise an error it names the rank that has failed."""
    kind = {"one rank killed": "PeerError", "one rank stopped": "CollectiveTimeoutError"}
    one = ranks.FAILING
    pattern = rf"{kind.get(name, 'CollectiveMismatchError')}: (.|\n)*\brank {one}\b(:| of)"
    return sum(re.match(pattern, text) is not None for text in outcome.errors.values())


def _counts(figures: Mapping[str, Any], by: str, kind: str) -> dict[str, dict[int, float]]:
    """Return counts by what was counted and by number of ranks; of several, the median."""
    found: dict[str, dict[int, list[float]]] = {}
    for row in figures["rows"]:
        if row["by"] == by:
            found.setdefault(row["what"], {}).setdefault(row["ranks"], []).append(row[kind])
    return {what: {size: median(counts) for size, counts in sizes.items()} for what, sizes in found.items()}


def _beside(counts: Mapping[int, float], theirs: Mapping[int, float]) -> dict[int, float]:
    """Return how much more was counted than torch alone does."""
    return {size: max(0.0, count - theirs[size]) for size, count in counts.items()}


def _law(what: str, counts: Mapping[int, float]) -> Law:
    many = {size: count for size, count in counts.items() if size >= _MANY}
    return law_of(many or counts, _NOISE_OF_TIMED if what in _TIMED else _NOISE)


def wrong(figures: Mapping[str, Any]) -> list[str]:
    """Return what grows with the square of the number of ranks, and must not; and ranks that were not named."""
    found = []
    for kind in KINDS:
        theirs = _counts(figures, "torch", kind)
        for what, counts in _counts(figures, "lockstep", kind).items():
            if kind in _BY_NATURE.get(what, ()):
                continue
            if what in _BESIDE_TORCH:
                counts = _beside(counts, theirs[what])
            if _law(what, counts).name == "n^2":
                beside = " beside torch's" if what in _BESIDE_TORCH else ""
                found.append(f"{what}: {KINDS[kind].lower()}{beside} grow with the square: {counts}")
    return found + [
        f"{row['what']}: named on {row['named']} of {row['ranks']} ranks"
        for row in figures["rows"]
        if row["what"] in ranks.FAULTS and row["named"] != _others(row["what"], row["ranks"])
    ]


def page(figures: Mapping[str, Any]) -> str:
    """Return the page."""
    sizes = sorted({row["ranks"] for row in figures["rows"]})
    text = _HEAD.format(
        sizes=_listed(sizes), torch=torch.__version__, per_node=PER_NODE, noise=_NOISE, timed=_NOISE_OF_TIMED,
        largest=sizes[-1],
    )  # fmt: skip
    for kind, title in KINDS.items():
        theirs = _counts(figures, "torch", kind)
        rows = [
            _cells(what, counts, theirs.get(what, {}))
            for what, counts in _counts(figures, "lockstep", kind).items()
            if any(counts.values())
        ]
        head = ("", *map(str, sizes), "law", *(f"at {size:,}" for size in FAR), f"torch at {sizes[-1]}", "its law")
        text += f"\n## {title}\n\n{table(head, rows)}"
    return text + _of_faults(figures, sizes[-1]) + _of_checkpoints(figures)


def _cells(what: str, counts: Mapping[int, float], theirs: Mapping[int, float]) -> list[str]:
    law = _law(what, counts)
    name = law.name
    if what in _BESIDE_TORCH and any(theirs.values()):
        name += f" ({_law(what, _beside(counts, theirs)).name} more than torch)"
    cells = [what, *map(_number, counts.values()), name, *(_number(law.at(size)) for size in FAR)]
    if not any(theirs.values()):
        return [*cells, "", ""]
    return [*cells, _number(list(theirs.values())[-1]), _law(what, theirs).name]


def _of_checkpoints(figures: Mapping[str, Any]) -> str:
    head = ("ranks", "tensors", *_OF_CHECKPOINTS.values())
    rows = [
        [
            f"{plan['ranks']:,}",
            f"{plan['tensors']:,}",
            *(f"{plan[key]:.2g} s" if key.endswith("_s") else _number(plan[key]) for key in _OF_CHECKPOINTS),
        ]
        for plan in figures["plans"]
    ]
    return f"\n## Checkpoints\n\n{_CHECKPOINTS}\n{table(head, rows)}" if rows else ""


def _of_faults(figures: Mapping[str, Any], size: int) -> str:
    rows = []
    for what in ranks.FAULTS:
        jobs = [row for row in figures["rows"] if row["what"] == what and row["ranks"] == size]
        named, others = sum(job["named"] for job in jobs), len(jobs) * _others(what, size)
        codes = {code for job in jobs for rank, code in enumerate(job["codes"]) if rank != ranks.FAILING}
        waits = f" (timeout {figures['timeout']:g} s)" if what == "one rank stopped" else ""
        seconds = max(job["seconds"] for job in jobs)
        rows.append([what, str(len(jobs)), f"{named} of {others}", f"{seconds:.1f} s{waits}", _listed(sorted(codes))])
    head = (f"of {size} ranks", "jobs", "named in the errors of", "after at most", "exit code of the others")
    files = next(row["files"] for row in figures["rows"] if row["what"] == "init_dist" and row["ranks"] == size)
    return (
        f"\n## {size} ranks on {os.cpu_count()} cores\n\n{table(head, rows)}\nA rank has {files} files open after "
        f"`init_dist`; {size - 1} of them are connections to the other ranks.\n"
    )


def _others(what: str, size: int) -> int:
    """Return how many ranks must raise an error that names the one that fails."""
    return size if what == "one rank with another call" else size - 1


def _listed(values: Sequence[object]) -> str:
    *most, last = map(str, values)
    return f"{', '.join(most)} and {last}" if most else last


def _number(value: float) -> str:
    """Return a number in at most four characters and its unit, as far as it is known so exactly."""
    if value < 10_000:
        return f"{value:,.0f}"
    for unit, factor in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= factor:
            return f"{value / factor:.3g} {unit}"
    raise AssertionError(value)
