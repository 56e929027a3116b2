"""What this machine has, and what its launcher said: found out without torch."""

from __future__ import annotations

import os
import platform
import resource
import socket
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from lockstep.cli.doctor.finding import Finding, Status, joined
from lockstep.errors import TopologyError
from lockstep.topology import infer_launcher, read_topology, topology_if_known
from lockstep.version import __version__

_OPTIONAL = (
    *("scikit-learn", "deepspeed", "colossalai", "pytest", "tensorboard", "mlflow", "wandb"),
    *("comet-ml", "aim", "clearml", "neptune", "dvclive"),
)
_SHM = Path("/dev/shm")
_SHM_PER_RANK = 256 * 2**20  # what the workers of a data loader soon need, and NCCL
_MIB = 2**20
_FEW_FILES, _TOO_FEW_FILES = 1024, 128
_FEW_PROCESSES, _TOO_FEW_PROCESSES = 1024, 64


def versions() -> list[Finding]:
    """Find out which versions are installed."""
    facts = {"lockstep": __version__, "python": platform.python_version(), "torch": installed("torch")}
    optional = {name: installed(name) for name in _OPTIONAL}
    return [
        Finding("lockstep", __version__, facts={"version": __version__}),
        Finding("python", f"{facts['python']} on {platform.platform()}", facts={"version": facts["python"]}),
        Finding("torch", facts["torch"], facts={"version": facts["torch"], "numpy": installed("numpy")}),
        Finding("optional", ", ".join(f"{name} {found}" for name, found in optional.items()), facts=optional),
    ]


def installed(package: str) -> str:
    """Return the version of an installed package, or "-"."""
    with suppress(PackageNotFoundError):
        return version(package)
    return "-"


def launcher(env: Mapping[str, str]) -> Finding:
    """Find out what started this process."""
    found = infer_launcher(env)
    if found == "none":
        return Finding("launcher", "none: lockstep starts its own ranks", facts={"launcher": "none"})
    try:
        at = read_topology(env, found)
    except TopologyError as error:
        return Finding("launcher", f"contradictory: {error}", "fault")
    text = f"{found}: rank {at.rank} of {at.world_size}, node {at.node_rank} of {at.num_nodes}"
    return Finding("launcher", text, facts={"launcher": found, "world_size": at.world_size, "nodes": at.num_nodes})


def variables(env: Mapping[str, str]) -> Finding:
    """Check variables that torch, OpenMP, gloo and NCCL read without telling what is wrong with them."""
    faults = []
    port = env.get("MASTER_PORT", "1")  # if a launcher is found, it is read with the launcher's variables
    if infer_launcher(env) == "none" and not (port.isascii() and port.isdecimal() and 0 < int(port) < 2**16):
        faults.append(f"MASTER_PORT must be a port from 1 to 65535, but is {port!r}. Unset it, or choose a free one")
    threads = env.get("OMP_NUM_THREADS", "1")
    if _threads_in(threads) is None:
        faults.append(f"OMP_NUM_THREADS must be a number of threads, at least 1, but is {threads!r}. Unset it")
    known = [name for _, name in socket.if_nameindex()]
    faults += [
        f"GLOO_SOCKET_IFNAME must be one of {', '.join(known)}, but is {name!r}. Unset it"
        for name in env.get("GLOO_SOCKET_IFNAME", "").split(",")
        if name not in ("", *known)
    ]
    wanted = env.get("NCCL_SOCKET_IFNAME", "")
    if not _nccl_matches(wanted, known):
        faults.append(f"NCCL_SOCKET_IFNAME must leave one of {', '.join(known)}, but is {wanted!r}. Unset it")
    return Finding("variables", "\n".join(faults) or "no contradictions", "fault" if faults else "ok")


def shared_memory(env: Mapping[str, str]) -> Finding:
    """Check that there is room in /dev/shm for the workers of data loaders."""
    if sys.platform != "linux":
        return Finding("shared memory", "not looked at on this system")
    ranks = topology_if_known(env).local_size
    enough = "Give the container more: `docker run --shm-size=8g`, or a volume at /dev/shm (docs: Clusters)"
    try:
        with tempfile.TemporaryFile(dir=_SHM) as file:
            os.posix_fallocate(file.fileno(), 0, 4 * _MIB)
    except OSError as error:
        text = f"{_SHM} cannot be written: {error.strerror}; workers of data loaders would fail"
        return Finding("shared memory", text, "fault", enough, {"writable": False})
    found = os.statvfs(_SHM)
    size, free = found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
    text = f"{_SHM}: {free // _MIB:,} MiB free of {size // _MIB:,} MiB"
    facts = {"writable": True, "size_bytes": size, "free_bytes": free}
    if free >= ranks * _SHM_PER_RANK:
        return Finding("shared memory", text, facts=facts)
    little = f"{text}: workers of data loaders that need more end by a bus error, and NCCL may fail"
    return Finding("shared memory", little, "warning", enough, facts)


def limits(env: Mapping[str, str]) -> Finding:
    """Check the limits of open files, processes and locked memory."""
    ranks = topology_if_known(env).world_size
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    memory, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    processes, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    others: list[tuple[Status, str, str]] = []
    if _below(files, _FEW_FILES + 2 * ranks):
        status: Status = "fault" if _below(files, _TOO_FEW_FILES + 2 * ranks) else "warning"
        says = f"only {files} files may be open; each connection to a rank and each tensor of a worker needs one"
        others.append((status, says, "Say `ulimit -n 65536`, or env_cfg=dict(resource_limit=65536) in the config."))
    if _below(processes, _FEW_PROCESSES) and os.geteuid() != 0:
        status = "fault" if _below(processes, _TOO_FEW_PROCESSES) else "warning"
        says = f"only {processes} processes and threads of this user may run"
        others.append(
            (status, says, "Say `ulimit -u 4096`, or ask the administrator (limits.conf, pids of a container).")
        )
    if _below(memory, 2**62) and any(Path("/sys/class/infiniband").glob("*")):
        says = f"only {memory // 1024} KiB may be locked, but InfiniBand needs all that it sends from"
        others.append(("warning", says, "Say `ulimit -l unlimited`; for Slurm, PropagateResourceLimits=NONE."))
    shown = {"nofile": files, "nproc": processes, "memlock_bytes": memory}
    facts = {name: None if value == resource.RLIM_INFINITY else value for name, value in shown.items()}
    said = ", ".join(f"{name} {'unlimited' if value is None else value}" for name, value in facts.items())
    return joined("limits", said, others, facts)


def cores(env: Mapping[str, str]) -> Finding:
    """Check that the threads of this node's ranks have a core each."""
    ranks = topology_if_known(env).local_size
    usable = usable_cores()
    given = _threads_in(env.get("OMP_NUM_THREADS", ""))
    threads = given or max(1, int(usable))
    facts: dict[str, Any] = {
        "machine": os.cpu_count(),
        "usable": usable,
        "affinity": affinity(),
        "threads_per_rank": threads,
        "ranks": ranks,
    }
    text = f"{os.cpu_count()}, of which this process may use {usable:g}"
    if given:
        text += f"; OMP_NUM_THREADS={env['OMP_NUM_THREADS']}"
    if threads > usable:
        text += ", more than that: threads wait for each other"
        return Finding("cores", text, "warning", f"Set OMP_NUM_THREADS to {int(usable) or 1} at most.", facts)
    return Finding("cores", text, facts=facts)


def usable_cores() -> float:
    """Return how many cores this process may use at a time: by its affinity and its control group."""
    own = float(len(affinity()) or os.cpu_count() or 1)
    for file in (Path("/sys/fs/cgroup/cpu.max"), Path("/sys/fs/cgroup/cpu/cpu.cfs_quota_us")):
        with suppress(OSError, ValueError):
            quota, period = [*file.read_text(encoding="utf-8").split(), "100000"][:2]
            if quota not in ("max", "-1"):
                return min(own, int(quota) / int(period))
    return own


def affinity() -> list[int]:
    """Return the cores that this process may run on; empty where the system does not say."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


def _threads_in(text: str) -> int | None:
    """Return the number of threads that a value of OMP_NUM_THREADS gives on the outermost level."""
    numbers = text.split(",")
    if not all(number.strip().isdecimal() and int(number) > 0 for number in numbers):
        return None
    return int(numbers[0])


def _nccl_matches(wanted: str, known: list[str]) -> bool:
    """Return whether some interface is left by NCCL's rule: prefixes, `=` for whole names, `^` to leave out."""
    leaves_out = wanted.startswith("^")
    names = wanted.removeprefix("^").removeprefix("=").split(",")
    whole = wanted.removeprefix("^").startswith("=")
    found = [each for each in known if any(each == name if whole else each.startswith(name) for name in names if name)]
    if not any(names):
        return True
    return len(found) < len(known) if leaves_out else bool(found)


def _below(limit: int, least: int) -> bool:
    return limit != resource.RLIM_INFINITY and limit < least
