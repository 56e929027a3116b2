"""What the ranks of a job find out together: whether they have the same, and how fast they reach each other."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as torch_dist

from lockstep.cli.doctor.finding import Finding, Status, summarise
from lockstep.cli.doctor.machine import affinity, device_of_rank, installed, usable_cores
from lockstep.dist import all_gather_object, broadcast_object, get_dist_info
from lockstep.errors import counted, ranks_in_words
from lockstep.version import __version__

_VARIABLES = ("NCCL_", "TORCH_", "PYTORCH_", "CUDA_LAUNCH_BLOCKING", "LOCKSTEP_CHECK", "OMP_NUM_THREADS")
# Parts of names of variables that may differ between ranks, or that torch itself sets.
_NOT_COMPARED = ("_IFNAME", "NCCL_HOSTID", "TORCHELASTIC", "TORCH_NCCL_ASYNC_ERROR_HANDLING")
_MOST_FOR_ALL_PAIRS = 8
_PING_PONGS = 30
_LARGE_PING_PONGS = 4
_BANDWIDTH_BYTES = 4 * 2**20
_CLOCK_SECONDS = 1.0  # a larger offset confuses who compares logs and files of several nodes
_SLOW = 4.0  # times as slow as the best quarter of the pairs of its kind
_SLOW_SECONDS = 200e-6  # a latency that nobody notices is no finding


class Pair(NamedTuple):
    """What two ranks have measured between them: seconds one way, and bytes per second."""

    first: int
    second: int
    latency: float
    bandwidth: float


def examine(own: Sequence[Finding]) -> list[Finding]:
    """Return the findings of all ranks, and those about the job as a whole; the same on every rank.

    **Collective**: every rank of a group that exists.

    Args:
        own: what this rank has found by itself.
    """
    described: list[dict[str, Any]] = all_gather_object(
        {"facts": _facts(), "findings": [finding.as_plain() for finding in own]}
    )
    facts: list[dict[str, Any]] = [each["facts"] for each in described]
    hosts = [each["host"] for each in facts]
    offsets, measured = _clock_offsets(facts), all_gather_object(_measured_pairs())
    return [
        *_of_ranks([each["findings"] for each in described]),
        _versions(facts),
        _environment(facts),
        Finding("hosts over ranks", _by_value(hosts), facts={"hosts": hosts}),
        _devices(facts),
        _threads(facts),
        _clocks(facts, offsets),
        _network(facts, measured),
    ]


def _facts() -> dict[str, Any]:
    variables = {
        name: value
        for name, value in os.environ.items()
        if name.startswith(_VARIABLES) and not any(part in name for part in _NOT_COMPARED)
    }
    return {
        "host": platform.node(),
        "versions": {
            "lockstep": __version__,
            "python": platform.python_version(),
            **{package: installed(package) for package in ("torch", "numpy")},
        },
        "variables": variables,
        "device": device_of_rank(),
        "cores": affinity(),
        "usable": usable_cores(),
        "threads": torch.get_num_threads(),
    }


def _of_ranks(found: Sequence[Sequence[Mapping[str, Any]]]) -> list[Finding]:
    """Return the findings of the ranks by themselves, those that are the same on several once."""
    alike: dict[Hashable, Finding] = {}
    for rank, findings in enumerate(found):
        for finding in map(Finding.of, findings):
            key = finding.name, finding.text, finding.status
            known = alike.get(key, finding)
            alike[key] = replace(known, ranks=(*known.ranks, rank))
    return list(alike.values())


def _differing(ranks: Sequence[Mapping[str, str]], status: Status, remedy: str) -> list[tuple[Status, str, str]]:
    """Return which names have different values on several ranks, for `summarise`."""
    values = {name: [each.get(name, "unset") for each in ranks] for name in sorted(set().union(*ranks))}
    return [(status, f"{name} differs: {_by_value(v)}", remedy) for name, v in values.items() if len(set(v)) > 1]


def _versions(facts: Sequence[Mapping[str, Any]]) -> Finding:
    others = _differing([each["versions"] for each in facts], "fault", "Install the same environment on all nodes.")
    usual = "" if others else "the same on all ranks: " + ", ".join(f"{n} {v}" for n, v in facts[0]["versions"].items())
    return summarise("versions over ranks", usual, others, {"versions": [each["versions"] for each in facts]})


def _environment(facts: Sequence[Mapping[str, Any]]) -> Finding:
    remedy = "Set it to the same on all ranks, or unset it."
    others = _differing([each["variables"] for each in facts], "warning", remedy)
    count = len(facts[0]["variables"])
    usual = "" if others else f"{counted(count, 'variable')} of torch, NCCL and OpenMP, the same on all ranks"
    return summarise("variables over ranks", usual, others, {"variables": [dict(each["variables"]) for each in facts]})


def _devices(facts: Sequence[Mapping[str, Any]]) -> Finding:
    devices = [each["device"] for each in facts]
    users: dict[Hashable, list[int]] = {}
    for rank, each in enumerate(facts):
        if each["device"]["id"]:
            users.setdefault((each["host"], each["device"]["id"]), []).append(rank)
    others: list[tuple[Status, str, str]] = [
        (
            "fault",
            f"{ranks_in_words(ranks)} on {facts[ranks[0]]['host']} use the same {devices[ranks[0]]['device']}",
            "Start at most one rank for each device, and let CUDA_VISIBLE_DEVICES show each rank its own, or all.",
        )
        for ranks in users.values()
        if len(ranks) > 1
    ]
    shown = _by_value(f"{each['device']} {each['name']}".strip() for each in devices)
    return summarise("devices over ranks", shown, others, {"devices": devices})


def _threads(facts: Sequence[Mapping[str, Any]]) -> Finding:
    """Check on each host that the threads of its ranks have a core each."""
    others: list[tuple[Status, str, str]] = []
    shown = []
    for host in dict.fromkeys(each["host"] for each in facts):
        here = [each for each in facts if each["host"] == host]
        cores = min(len(set().union(*(each["cores"] for each in here))), sum(each["usable"] for each in here)) or 1
        threads = sum(each["threads"] for each in here)
        shown.append(f"{host}: {counted(threads, 'thread')} of {counted(len(here), 'rank')} on {cores:g} cores")
        if threads > cores:
            says = f"{shown.pop()}: they wait for each other"
            least = max(1, int(cores) // len(here))
            remedy = f"Set OMP_NUM_THREADS={least}" + (", and start fewer ranks." if len(here) > cores else ".")
            others.append(("warning", says, remedy))
    facts_of = {"threads": [each["threads"] for each in facts], "cores": [each["cores"] for each in facts]}
    return summarise("threads over ranks", "\n".join(shown), others, facts_of)


def _clock_offsets(facts: Sequence[Mapping[str, Any]]) -> dict[int, float]:
    """Return how many seconds the clocks of other ranks are ahead of rank 0's, as rank 0 has measured; 0 within error.

    In a large job, one rank of each host is asked.
    """
    rank, size = get_dist_info()
    hosts = [each["host"] for each in facts]
    asked = [r for r in range(1, size) if size <= _MOST_FOR_ALL_PAIRS or (r == hosts.index(hosts[r]))]
    offsets: dict[int, float] = {}
    said = torch.zeros(1, dtype=torch.float64)
    for other in asked:
        best = (float("inf"), 0.0)
        for _ in range(8 if rank in (0, other) else 0):
            if rank == 0:
                begun = time.time()
                torch_dist.send(said, other)
                torch_dist.recv(said, other)
                ended = time.time()
                best = min(best, (ended - begun, float(said) - (begun + ended) / 2))
            else:
                torch_dist.recv(said, 0)
                said[0] = time.time()
                torch_dist.send(said, 0)
        if rank == 0:
            offsets[other] = best[1] if abs(best[1]) > best[0] else 0.0
    return broadcast_object(offsets)


def _clocks(facts: Sequence[Mapping[str, Any]], offsets: Mapping[int, float]) -> Finding:
    others: list[tuple[Status, str, str]] = [
        (
            "warning",
            f"the clock of rank {rank} ({facts[rank]['host']}) is {abs(offset):.1f} s "
            f"{'ahead of' if offset > 0 else 'behind'} that of rank 0",
            "Let chrony or ntpd set the clocks: times in logs and files of several nodes cannot be compared.",
        )
        for rank, offset in offsets.items()
        if abs(offset) > _CLOCK_SECONDS
    ]
    largest = max(map(abs, offsets.values()), default=0.0)
    usual = "" if others else f"within {max(largest, 1e-3) * 1e3:.0f} ms of rank 0's"
    return summarise(
        "clocks over ranks", usual, others, {"offset_seconds": {str(rank): o for rank, o in offsets.items()}}
    )


def pairs_of(size: int) -> Iterator[tuple[int, int]]:
    """Yield the pairs to measure: all in a small job, else each rank's with the next and with one half around.

    Example:
        >>> list(pairs_of(3)), len(list(pairs_of(64)))
        ([(0, 1), (0, 2), (1, 2)], 96)
    """
    if size <= _MOST_FOR_ALL_PAIRS:
        yield from combinations(range(size), 2)
        return
    others = ((rank, (rank + step) % size) for rank in range(size) for step in (1, size // 2))
    yield from sorted({(min(pair), max(pair)) for pair in others})


def _measured_pairs() -> list[Pair]:
    """Return what this rank has measured: the lower one of each pair does. **Collective**: every rank."""
    rank, size = get_dist_info()
    found = []
    small, large = torch.zeros(1), torch.zeros(_BANDWIDTH_BYTES, dtype=torch.uint8)
    for first, second in pairs_of(size):
        if rank in (first, second):
            other = second if rank == first else first
            _ping_pong(small, other, leads=rank == first)  # connects
            times = sorted(_ping_pong(small, other, leads=rank == first) for _ in range(_PING_PONGS))
            large_times = [_ping_pong(large, other, leads=rank == first) for _ in range(_LARGE_PING_PONGS)]
            if rank == first:
                # The best times show the network; others show what else the hosts do at this moment, too.
                latency = times[len(times) // 4] / 2
                seconds = max(min(large_times) / 2 - latency, 1e-9)
                found.append(Pair(first, second, latency, _BANDWIDTH_BYTES / seconds))
        if size <= _MOST_FOR_ALL_PAIRS:
            torch_dist.barrier()  # so that no two pairs share the network
    return found


def _ping_pong(data: torch.Tensor, other: int, *, leads: bool) -> float:
    begun = time.perf_counter()
    if leads:
        torch_dist.send(data, other)
        torch_dist.recv(data, other)
    else:
        torch_dist.recv(data, other)
        torch_dist.send(data, other)
    return time.perf_counter() - begun


def _network(facts: Sequence[Mapping[str, Any]], measured: Iterable[Sequence[Pair]]) -> Finding:
    pairs = [Pair(*pair) for each in measured for pair in each]
    hosts = [each["host"] for each in facts]
    others: list[tuple[Status, str, str]] = []
    shown = []
    for title, group in (
        ("on one host", [pair for pair in pairs if hosts[pair.first] == hosts[pair.second]]),
        ("between hosts", [pair for pair in pairs if hosts[pair.first] != hosts[pair.second]]),
    ):
        if not group:
            continue
        latency, bandwidth = median(pair.latency for pair in group), median(pair.bandwidth for pair in group)
        shown.append(f"{title}: {_speed(latency, bandwidth)} (median of {counted(len(group), 'pair')})")
        slow = outliers(group)
        others += [
            (
                "warning",
                f"slow: ranks {pair.first} and {pair.second} ({hosts[pair.first]}, {hosts[pair.second]}): "
                f"{_speed(pair.latency, pair.bandwidth)}",
                "",
            )
            for pair in list(slow)[:8]
        ]
        if slow:
            rank = rank_to_blame(slow)
            who = "these" if rank is None else f"rank {rank} ({hosts[rank]})"
            remedy = f"Look at the network and the load of {who}: every collective waits for the slowest."
            others[-1] = (*others[-1][:2], remedy)
    plain = [pair._asdict() for pair in pairs]
    return summarise(
        "network over ranks", "\n".join(shown), others, {"pairs": plain, "message_bytes": _BANDWIDTH_BYTES}
    )


def outliers(pairs: Sequence[Pair]) -> dict[Pair, float]:
    """Return the pairs that are much slower than the best quarter, and how many times, the slowest first.

    Of fewer than three pairs, none is.

    Example:
        >>> fast, slow = [Pair(0, 1, 5e-5, 1e9), Pair(0, 2, 6e-5, 9e8)], Pair(1, 2, 5e-5, 1e8)
        >>> outliers([*fast, slow]) == {slow: 10.0}
        True
    """
    if len(pairs) < 3:
        return {}
    latency = sorted(pair.latency for pair in pairs)[len(pairs) // 4]
    bandwidth = sorted((pair.bandwidth for pair in pairs), reverse=True)[len(pairs) // 4]
    found = {
        pair: max(pair.latency / latency, bandwidth / pair.bandwidth)
        for pair in pairs
        if pair.latency > max(_SLOW * latency, _SLOW_SECONDS + latency) or pair.bandwidth < bandwidth / _SLOW
    }
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def rank_to_blame(slow: Mapping[Pair, float]) -> int | None:
    """Return the rank that all of the slow pairs have in common, or else the slowest ones; None if there is none.

    Example:
        >>> rank_to_blame({Pair(0, 2, 5e-5, 1e7): 100.0, Pair(1, 2, 5e-5, 1e7): 90.0, Pair(0, 1, 3e-4, 1e9): 5.0})
        2
    """
    slowest = [pair for pair, times in slow.items() if times > max(slow.values()) / 2]
    for pairs in (list(slow), slowest):
        common = set.intersection(*({pair.first, pair.second} for pair in pairs)) if len(pairs) > 1 else set()
        if common:
            return min(common)
    return None


def _speed(latency: float, bandwidth: float) -> str:
    return f"{latency * 1e6:,.0f} us, {bandwidth / 1e6:,.0f} MB/s"


def _by_value(values: Iterable[str]) -> str:
    """Return each value with its ranks; the value alone if all have it."""
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    if len(ranks) == 1:
        return next(iter(ranks))
    return ", ".join(f"{value} ({ranks_in_words(found)})" for value, found in ranks.items())
