"""What this process finds out alone: the machine, its launcher, its network, and what torch finds there.

Nothing before the functions at the end imports torch.
"""

from __future__ import annotations

import errno
import os
import platform
import resource
import socket
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

from lockstep.cli.doctor.finding import Finding, Status, summarise
from lockstep.errors import TopologyError, counted, message_of
from lockstep.launch.job import (
    LOOPBACK,
    address_of,
    answers,
    interface_towards,
    threads_in,
    usable_cores,
    variable_faults,
)
from lockstep.topology import infer_launcher, read_topology, topology_if_known
from lockstep.topology.environ import is_loopback
from lockstep.version import __version__

_OPTIONAL = (
    *("scikit-learn", "deepspeed", "colossalai", "pytest", "tensorboard", "mlflow", "wandb"),
    *("comet-ml", "aim", "clearml", "dvclive"),
)
_SHM = Path("/dev/shm")
_SHM_PER_RANK = 256 * 2**20  # what the workers of a data loader soon need, and NCCL
_MIB = 2**20
_FEW_FILES, _TOO_FEW_FILES = 1024, 128
_INTERFACES = Path("/sys/class/net")
_IFF_UP, _IFF_LOOPBACK = 0x1, 0x8  # in `flags` of each
_PATIENCE_SECONDS = 2.0


def versions() -> list[Finding]:
    """Find out which versions are installed."""
    python, torch = platform.python_version(), installed("torch")
    optional = {name: installed(name) for name in _OPTIONAL}
    return [
        Finding("lockstep", __version__, facts={"version": __version__}),
        Finding("python", f"{python} on {platform.platform()}", facts={"version": python}),
        Finding("torch", torch, facts={"version": torch, "numpy": installed("numpy")}),
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
    if found == "none" and (lacking := _lacking_of_slurm(env)):
        text = f"none, although SLURM_PROCID is {env['SLURM_PROCID']}: what Slurm sets beside it is missing: "
        text += ", ".join(lacking)
        remedy = "Pass on all of Slurm's variables (a container, sudo or ssh may drop some), or unset SLURM_PROCID."
        return Finding("launcher", text, "fault", remedy, {"launcher": "none"})
    if found == "none":
        return Finding("launcher", "none: lockstep starts its own ranks", facts={"launcher": "none"})
    try:
        at = read_topology(env, found)
    except TopologyError as error:
        return Finding("launcher", f"contradictory: {error}", "fault")
    text = f"{found}: rank {at.rank} of {at.world_size}, node {at.node_rank} of {at.num_nodes}"
    return Finding("launcher", text, facts={"launcher": found, "world_size": at.world_size, "nodes": at.num_nodes})


def _lacking_of_slurm(env: Mapping[str, str]) -> list[str]:
    """Return the variables that Slurm sets where it sets SLURM_PROCID, but that are missing."""
    needed = ["SLURM_JOB_NODELIST"]
    if env.get("SLURM_PROCID") != "0":  # the body of an sbatch script has 0, and is no task of a step
        needed += ["SLURM_STEP_ID", "SLURM_STEP_TASKS_PER_NODE"]
    return [name for name in needed if name not in env] if "SLURM_PROCID" in env else []


def variables(env: Mapping[str, str]) -> Finding:
    """Check variables that torch, OpenMP and gloo read without telling what is wrong with them."""
    faults = variable_faults(env)
    port = env.get("MASTER_PORT", "1")  # if a launcher is found, it is read with the launcher's variables
    if infer_launcher(env) == "none" and not (port.isascii() and port.isdecimal() and 0 < int(port) < 2**16):
        faults.append(f"MASTER_PORT must be a port from 1 to 65535, but is {port!r}. Unset it, or choose a free one")
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
    """Check the limits of open files and of locked memory."""
    ranks = topology_if_known(env).world_size
    _, files = resource.getrlimit(resource.RLIMIT_NOFILE)  # `init_dist` raises the soft limit to the hard one
    memory, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    others: list[tuple[Status, str, str]] = []
    if _below(files, _FEW_FILES + 2 * ranks):
        status: Status = "fault" if _below(files, _TOO_FEW_FILES + 2 * ranks) else "warning"
        says = f"only {files} files may be open; each connection to a rank and each tensor of a worker needs one"
        others.append((status, says, "Ask the administrator for more (limits.conf, `docker run --ulimit`)."))
    if _below(memory, 2**62) and any(Path("/sys/class/infiniband").glob("*")):
        says = f"only {memory // 1024} KiB may be locked, but InfiniBand needs all that it sends from"
        others.append(("warning", says, "Say `ulimit -l unlimited`; for Slurm, PropagateResourceLimits=NONE."))
    shown = {"nofile": files, "memlock_bytes": memory}
    facts = {name: None if value == resource.RLIM_INFINITY else value for name, value in shown.items()}
    said = ", ".join(f"{name} {'unlimited' if value is None else value}" for name, value in facts.items())
    return summarise("limits", said, others, facts)


def cores(env: Mapping[str, str]) -> Finding:
    """Check that the threads of a rank have a core each."""
    ranks = topology_if_known(env).local_size
    usable = usable_cores()
    given = threads_in(env.get("OMP_NUM_THREADS", ""))
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
    if threads > max(usable, 1):
        text += ", more than that: threads wait for each other"
        return Finding("cores", text, "warning", f"Set OMP_NUM_THREADS to {max(int(usable), 1)} at most.", facts)
    return Finding("cores", text, facts=facts)


def affinity() -> list[int]:
    """Return the cores that this process may run on; empty where the system does not say."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


def _below(limit: int, least: int) -> bool:
    return limit != resource.RLIM_INFINITY and limit < least


class Interface(NamedTuple):
    """A network interface: its IPv4 address, if any, and whether it is up and the loopback interface."""

    name: str
    address: str | None
    is_up: bool
    is_loopback: bool


def host(env: Mapping[str, str]) -> Finding:
    """Check that the names of this machine and of the one where ranks meet resolve."""
    name = socket.gethostname()
    own = addresses_of(name)
    others: list[tuple[Status, str, str]] = []
    if not own:
        remedy = "Add it to /etc/hosts or to the name server; without it, gloo takes the loopback interface."
        others.append(("warning", "this name does not resolve", remedy))
    at = topology_if_known(env)
    facts = {"name": name, "addresses": own}
    if at.master_addr is not None:
        facts["master_addresses"] = found = addresses_of(at.master_addr)
        what = "MASTER_ADDR" if env.get("MASTER_ADDR") else "the node of rank 0"
        # Debian gives a host's own name such an address, at which rank 0 listens all the same, beside all others.
        serves = at.node_rank == 0 and bool(env.get("GLOO_SOCKET_IFNAME"))
        if not found:
            remedy = "Give MASTER_ADDR the address or a name of the node of rank 0 that resolves on all nodes."
            if at.num_nodes == 1 and at.local_size == at.world_size and not at.agent_store:
                others.append(
                    (
                        "warning",
                        f"{what}, {at.master_addr}, does not resolve, which ranks on one node do without",
                        remedy,
                    )
                )
            else:
                says = f"{what}, {at.master_addr}, does not resolve: the ranks cannot meet there"
                others.append(("fault", says, remedy))
        elif at.num_nodes > 1 and all(map(is_loopback, found)) and not serves:
            says = f"{what}, {at.master_addr}, is {found[0]} here, which no other node reaches"
            others.append(("fault", says, "Give an address of the node of rank 0 in the network between the nodes."))
    return summarise("host", f"{name} ({', '.join(own) or 'no address'})", others, facts)


def addresses_of(name: str) -> list[str]:
    """Return the addresses to which a name resolves."""
    with suppress(OSError, UnicodeError):
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        return list(dict.fromkeys(str(address[0]) for *_, address in found))
    return []


def interfaces(env: Mapping[str, str]) -> Finding:
    """Check the interfaces, and that the one that gloo takes leads to the other ranks."""
    known = list(_interfaces())
    at = topology_if_known(env)
    several = at.num_nodes > 1
    given = env.get("GLOO_SOCKET_IFNAME", "")
    set_by_launcher = os.environ.get("GLOO_SOCKET_IFNAME")  # which `env` lacks: it is not the user's to unset
    taken = given or set_by_launcher or (None if several else interface_towards(LOOPBACK))
    others: list[tuple[Status, str, str]] = []
    name = socket.gethostname()
    if taken is None and (own := addresses_of(name)) and all(map(is_loopback, own)):
        towards = interface_towards(at.master_addr or LOOPBACK)
        remedy = "Set GLOO_SOCKET_IFNAME to the interface between the nodes"
        if at.node_rank != 0 and towards is not None:
            remedy += f", here {towards}"
        says = f"gloo takes that of the host name, {name}, which is {own[0]} here: no other node reaches it"
        others.append(("fault", says, f"{remedy}."))
    for each in known:
        if each.name not in given.split(","):
            continue
        remedy = f"Unset GLOO_SOCKET_IFNAME, bring {each.name} up, or name another interface."
        if not each.is_up or each.address is None:
            lacks = "is down" if not each.is_up else "has no IPv4 address"
            others.append(("fault", f"GLOO_SOCKET_IFNAME names {each.name}, which {lacks}", remedy))
        elif several and each.is_loopback:
            says = f"GLOO_SOCKET_IFNAME names {each.name}, the loopback interface, but the ranks are on several nodes"
            others.append(("fault", says, remedy))
    shown = ", ".join(f"{each.name} {each.address or '-'}{'' if each.is_up else ' (down)'}" for each in known)
    facts = {"interfaces": [each._asdict() for each in known], "gloo": taken}
    return summarise("interfaces", f"{shown}; gloo takes {taken or 'that of the host name'}", others, facts)


def port(env: Mapping[str, str]) -> Finding:
    """Check MASTER_PORT: free where rank 0 will listen, and answering where the launcher's store does already."""
    text, at = env.get("MASTER_PORT", ""), topology_if_known(env)
    number = int(text) if text.isascii() and text.isdecimal() and 0 < int(text) < 2**16 else None
    if number is None and at.world_size > 1 and not at.job_key:
        says = f"none is given, by which the {at.world_size} ranks could find each other"
        return Finding("port", says, "fault", "Set MASTER_ADDR and MASTER_PORT, the same for all ranks.")
    if number is None:  # what is wrong with its text is a matter of the variables
        return Finding("port", "none is given: lockstep finds a free one")
    if at.agent_store and at.master_addr is not None:
        facts = {"port": number, "is_free": False}
        if answers(at.master_addr, number, _PATIENCE_SECONDS):
            return Finding("port", f"the launcher's store answers at {at.master_addr}:{number}", facts=facts)
        remedy = "Let a firewall pass it, and check that the launcher of node 0 is alive."
        return Finding("port", f"nobody answers at {at.master_addr}:{number}, MASTER_PORT", "fault", remedy, facts)
    if at.rank != 0:
        return Finding("port", f"{number}, where rank 0 will listen", facts={"port": number})
    why = _why_not(number)
    if why is None:
        return Finding("port", f"{number} (MASTER_PORT) is free", facts={"port": number, "is_free": True})
    remedy = f"Choose another MASTER_PORT, the same for all ranks, or see by `ss -ltnp sport = :{number}` who has it."
    return Finding("port", f"{number} (MASTER_PORT) {why}", "fault", remedy, {"port": number, "is_free": False})


def _interfaces() -> Iterator[Interface]:
    for _, name in socket.if_nameindex():
        flags = 0 if _INTERFACES.is_dir() else _IFF_UP  # other systems do not say
        with suppress(OSError):
            flags = int((_INTERFACES / name / "flags").read_text(encoding="ascii"), 16)
        yield Interface(name, address_of(name), bool(flags & _IFF_UP), bool(flags & _IFF_LOOPBACK))


def _why_not(number: int) -> str | None:
    """Return why a store could not listen at a port of this machine; None if it could."""
    try:
        socket.create_server(("", number)).close()
    except OSError as error:
        return "is in use" if error.errno == errno.EADDRINUSE else f"cannot be listened at ({error.strerror})"
    return None


def accelerators(env: Mapping[str, str]) -> Finding:
    """Check that torch finds the devices that the variables name."""
    import torch

    wanted = [name for name in env.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    found = torch.cuda.device_count()
    if wanted and wanted[0].strip() not in ("-1", "NoDevFiles") and found < len(wanted):
        has_gpus = torch.version.cuda is not None or torch.version.hip is not None
        why = f"torch finds {found}" if has_gpus else "this torch is built without CUDA"
        says = (
            f"CUDA_VISIBLE_DEVICES names {counted(len(wanted), 'device')}, {env['CUDA_VISIBLE_DEVICES']!r}, but {why}"
        )
        return Finding("accelerators", says, "fault", "Unset it, or see what nvidia-smi shows.", {"count": found})
    if not torch.accelerator.is_available():
        if found:  # the driver's library counts them, also where no program can use them
            says = f"torch finds {found}, but can't use them: {_why_no_cuda()}"
            remedy = "See what nvidia-smi says of the driver, and python -c 'import torch; torch.cuda.init()'."
            return Finding("accelerators", says, "fault", remedy, {"count": 0})
        return Finding("accelerators", "none: ranks compute on the CPU", facts={"count": 0})
    kind = torch.accelerator.current_accelerator()
    count = torch.accelerator.device_count()
    module: Any = torch.get_device_module(kind)
    names = [str(getattr(module, "get_device_name", str)(index)) for index in range(count)]
    text = f"{count} x {kind} ({', '.join(sorted(set(names)))})"
    return Finding("accelerators", text, facts={"count": count, "kind": str(kind), "names": names})


def _why_no_cuda() -> str:
    import torch

    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:
        return message_of(error)
    return "torch does not say why"


def backends(env: Mapping[str, str]) -> Finding:
    """Check that torch has gloo."""
    import torch.distributed as dist

    remedy = "Install one from pytorch.org."
    if not dist.is_available():
        return Finding("backends", "none: this torch is built without torch.distributed", "fault", remedy)
    names = ("gloo", "nccl", "mpi", "ucc", "xccl")
    found = [name for name in names if getattr(dist, f"is_{name}_available")()]
    facts = {"backends": found}
    if "gloo" in found:
        return Finding("backends", ", ".join(found), facts=facts)
    lacks = "lockstep needs gloo, with which this torch is not built"
    return Finding("backends", f"{', '.join(found) or 'none'}: {lacks}", "fault", remedy, facts)


def device_of_rank() -> dict[str, str]:
    """Return the device of this rank: what it is called, and what tells it from others on the same host."""
    import torch

    from lockstep.device import identity_of

    if not torch.accelerator.is_available():
        return {"device": "cpu", "id": "", "name": ""}
    kind = torch.accelerator.current_accelerator()
    index = torch.accelerator.current_device_index()
    module: Any = torch.get_device_module(kind)
    named = str(getattr(module, "get_device_name", lambda _: kind)(index))
    device = torch.device(f"{kind}:{index}")
    return {"device": str(device), "id": identity_of(device), "name": named}
