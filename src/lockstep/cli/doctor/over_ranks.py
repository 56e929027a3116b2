"""What the ranks of a job find out together: whether versions, variables, devices and cores go together."""

from __future__ import annotations

import os
import platform
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from lockstep.cli.doctor.finding import Finding, Status, summarise
from lockstep.cli.doctor.machine import affinity, device_of_rank, installed
from lockstep.dist import all_gather_object
from lockstep.errors import counted, ranks_in_words
from lockstep.launch.job import usable_cores
from lockstep.topology.pid_namespace import machine, pid_namespace
from lockstep.version import __version__

_VARIABLES = ("NCCL_", "TORCH_", "PYTORCH_", "CUDA_LAUNCH_BLOCKING", "LOCKSTEP_CHECK", "OMP_NUM_THREADS")
# Parts of names of variables that may differ between ranks, or that torch itself sets.
_NOT_COMPARED = ("_IFNAME", "NCCL_HOSTID", "TORCH_NCCL_ASYNC_ERROR_HANDLING")


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
    versions = ", ".join(f"{name} {version}" for name, version in facts[0]["versions"].items())
    variables = f"{counted(len(facts[0]['variables']), 'variable')} of torch, NCCL and OpenMP"
    return [
        *_of_ranks([each["findings"] for each in described]),
        _compared("versions", facts, "fault", "Install the same environment on all nodes.", versions),
        _compared("variables", facts, "warning", "Set it to the same on all ranks, or unset it.", variables),
        Finding("hosts over ranks", _by_value(hosts), facts={"hosts": hosts}),
        _devices(facts),
        _threads(facts),
    ]


def _facts() -> dict[str, Any]:
    variables = {
        name: value
        for name, value in os.environ.items()
        if name.startswith(_VARIABLES) and not any(part in name for part in _NOT_COMPARED)
    }
    return {
        "host": platform.node(),
        "machine": machine(),
        "container": pid_namespace(),
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
    """Return what each rank has found by itself; what several have found alike comes once, with all of them."""
    alike: dict[Hashable, Finding] = {}
    for rank, findings in enumerate(found):
        for finding in map(Finding.of, findings):
            key = finding.name, finding.text, finding.status
            known = alike.get(key, finding)
            alike[key] = replace(known, ranks=(*known.ranks, rank))
    return list(alike.values())


def _compared(what: str, facts: Sequence[Mapping[str, Any]], status: Status, remedy: str, same: str) -> Finding:
    """Find out which of the versions, or of the variables, differ between ranks; `same` says which were compared."""
    ranks = [each[what] for each in facts]
    values = {name: [each.get(name, "unset") for each in ranks] for name in sorted(set().union(*ranks))}
    others = [(status, f"{name} differs: {_by_value(v)}", remedy) for name, v in values.items() if len(set(v)) > 1]
    return summarise(f"{what} over ranks", "" if others else f"the same on all ranks: {same}", others, {what: ranks})


def _devices(facts: Sequence[Mapping[str, Any]]) -> Finding:
    devices = [each["device"] for each in facts]
    users: dict[Hashable, list[int]] = {}
    for rank, each in enumerate(facts):
        if each["device"]["id"]:
            users.setdefault((each["machine"], each["device"]["id"]), []).append(rank)
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
    """Check on each host, and in each container, that the threads of its ranks have a core each."""
    others: list[tuple[Status, str, str]] = []
    shown = []
    for container in dict.fromkeys(each["container"] for each in facts):
        here = [each for each in facts if each["container"] == container]
        cores: float = len(set().union(*(each["cores"] for each in here))) or here[0]["usable"]
        # A rank that may use less than the cores it is bound to has a quota, which those of its container share.
        cores = min([cores, *(each["usable"] for each in here if each["usable"] < len(each["cores"]))])
        threads = sum(each["threads"] for each in here)
        shown.append(
            f"{here[0]['host']}: {counted(threads, 'thread')} of {counted(len(here), 'rank')} on {cores:g} cores"
        )
        if threads > cores:
            says = f"{shown.pop()}: they wait for each other"
            for_each = max(1, int(cores) // len(here))
            remedy = f"Set OMP_NUM_THREADS={for_each}" + (", and start fewer ranks." if len(here) > cores else ".")
            others.append(("warning", says, remedy))
    numbers = {key: [each[key] for each in facts] for key in ("threads", "cores")}
    return summarise("threads over ranks", "\n".join(shown), others, numbers)


def _by_value(values: Iterable[str]) -> str:
    """Return each value with its ranks; the value alone if all have it."""
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    if len(ranks) == 1:
        return next(iter(ranks))
    return ", ".join(f"{value} ({ranks_in_words(found)})" for value, found in ranks.items())
