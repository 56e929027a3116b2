"""A job's ranks and nodes, and where they meet: `JobSpec`, and this machine's cores, network sockets and interfaces."""

from __future__ import annotations

import errno
import fcntl
import math
import os
import signal
import socket
import struct
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path, PurePosixPath

LOOPBACK = "127.0.0.1"
_SIOCGIFADDR = 0x8915
FUNCTION = "--function"
"""What a rank is started with in the place of a script, when `launch` was given a function."""
SENT_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
"""What asks a training to save and to stop, and is sent by programs; Ctrl-C does so, too, but a second one ends it."""
_CHECK_MODES = ("off", "sample", "always")  # those of `lockstep.dist.CheckMode`, which is not imported here
NUMA_MODES = ("node", "socket", "exclusive", "core-complex")
"""What a rank may be bound to: the values of `torch.numa.binding.AffinityMode`, which is not imported here."""


@dataclass(frozen=True, slots=True)
class JobSpec:
    """The number of ranks and nodes of a job, and the address where the nodes connect.

    Attributes:
        nproc: number of ranks on this node.
        nnodes: number of nodes of the job; with `least_nnodes`, the largest.
        node_rank: the number of this node.
        rdzv: ``"HOST:PORT"`` where the nodes connect; HOST is an address of node 0. None with one node.
        least_nproc: when ranks are restarted, those that were lost are left out, as long as so many remain. None keeps
            their number.
        least_nnodes: nodes that are lost are left out, and taken in again when they come back, as long as so many are
            there, node 0 among them. None needs all.
        rdzv_timeout_seconds: how long to wait for all nodes; above 0.

    Raises:
        ValueError: a number is out of range, or `rdzv` is missing, not valid, or given with one node.
    """

    nproc: int = 1
    nnodes: int = 1
    node_rank: int = 0
    rdzv: str | None = None
    least_nproc: int | None = None
    least_nnodes: int | None = None
    rdzv_timeout_seconds: float = 900.0

    def __post_init__(self) -> None:
        for name, count in (("--nproc", self.nproc), ("--nnodes", self.nnodes)):
            if count < 1:
                raise ValueError(f"`{name}` must be at least 1, but is {count}")
        for name, least, most in (("nproc", self.least_nproc, self.nproc), ("nnodes", self.least_nnodes, self.nnodes)):
            if least is not None and not 1 <= least <= most:
                raise ValueError(f"`least_{name}` must be from 1 to `{name}`, {most}, but is {least}")
        if self.nnodes == 1 and (self.rdzv is not None or self.node_rank > 0):
            given = f"`--rdzv` is {self.rdzv!r}" if self.rdzv is not None else f"`--node-rank` is {self.node_rank}"
            raise ValueError(
                f"`--nnodes`, the number of machines, must be given for several of them, as {given}. Give --nnodes and "
                "--rdzv HOST:PORT, the same on every node, and each node its own --node-rank"
            )
        if not 0 <= self.node_rank < self.nnodes:
            raise ValueError(
                f"`--node-rank` must be from 0 to {self.nnodes - 1}, since `--nnodes` is {self.nnodes}, "
                f"but is {self.node_rank}"
            )
        if not self.rdzv_timeout_seconds > 0:
            raise ValueError(f"`rdzv_timeout_seconds` must be above 0, but is {self.rdzv_timeout_seconds}")
        self.endpoint()  # raises if `rdzv` is not valid

    def endpoint(self) -> tuple[str, int]:
        """Return host and port of `rdzv`; with one node, the loopback address and port 0 (any free port)."""
        if self.nnodes == 1:
            return LOOPBACK, 0
        host, _, port = (self.rdzv or "").rpartition(":")
        labels = host.removesuffix(".").split(".")  # Python looks up none that is empty or longer
        is_host = "/" not in host and all(0 < len(label) < 64 for label in labels)
        if not is_host or not port.isdecimal() or not 0 < int(port) < 65536:
            given = "missing" if self.rdzv is None else repr(self.rdzv)
            raise ValueError(
                "`--rdzv` must be HOST:PORT, an address of node 0 and a free port there, the same on every node, "
                f"but is {given}. Example: --rdzv node0:29500"
            )
        return host.strip("[]"), int(port)


def usable_cores() -> float:
    """Return how many cores this process may use at a time: by its affinity and its control groups (Linux)."""
    own = float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    return min([own, *quotas(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup"))])


def quotas(groups: Path, root: Path) -> Iterator[float]:
    """Yield the cores that control groups leave a process: its own, and those that they lie in.

    Args:
        groups: lists them, as cgroups(7) says.
        root: where they are mounted. A container may see its own there, and in `groups` the path that its host sees.
    """
    with suppress(OSError):
        for line in groups.read_text(encoding="utf-8").splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and "cpu" not in controllers.split(","):
                continue
            files = ("cpu/{}/cpu.cfs_quota_us", "cpu/{}/cpu.cfs_period_us") if controllers else ("{}/cpu.max",)
            for place in (PurePosixPath(path), *PurePosixPath(path).parents):
                with suppress(OSError, ValueError):  # there is none, or it is "max"
                    texts = [(root / file.format(f".{place}")).read_text(encoding="utf-8") for file in files]
                    quota, period = map(int, " ".join(texts).split())
                    if quota > 0:
                        yield quota / period


def threads_in(text: str) -> int | None:
    """Return the number of threads that a value of OMP_NUM_THREADS gives on the outermost level."""
    numbers = text.split(",")
    if not all(number.strip().isdecimal() and int(number) > 0 for number in numbers):
        return None
    return int(numbers[0])


def _is_positive(number: str) -> bool:
    try:
        return 0 < float(number) < math.inf
    except ValueError:
        return False


def variable_faults(env: Mapping[str, str]) -> list[str]:
    """Return what is wrong with the variables that ranks inherit from this process; an empty one counts as unset."""
    faults = []
    threads = env.get("OMP_NUM_THREADS") or "1"
    if threads_in(threads) is None:
        faults.append(f"OMP_NUM_THREADS must be a number of threads, at least 1, but is {threads!r}. Unset it")
    if (mode := env.get("LOCKSTEP_CHECK") or "off") not in _CHECK_MODES:
        faults.append(f"LOCKSTEP_CHECK must be one of {', '.join(_CHECK_MODES)}, but is {mode!r}. Unset it")
    seconds = env.get("LOCKSTEP_HEARTBEAT") or "1"
    if not _is_positive(seconds):
        faults.append(f"LOCKSTEP_HEARTBEAT must be a number of seconds above 0, but is {seconds!r}. Unset it")
    known = [name for _, name in socket.if_nameindex()]
    return faults + [
        f"GLOO_SOCKET_IFNAME must be one of {', '.join(known)}, but is {name!r}. Unset it"
        for name in env.get("GLOO_SOCKET_IFNAME", "").split(",")
        if name not in ("", *known)
    ]


def listener(host: str, port: int) -> socket.socket:
    """Return a socket that listens only on one address of this machine.

    If other machines reach this one as `host`, but no interface here has that address (behind NAT), the socket listens
    on all addresses.
    """
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    try:
        return socket.create_server(address, family=family, backlog=1024)
    except OSError as error:
        if error.errno != errno.EADDRNOTAVAIL:
            raise
        return socket.create_server(("", port), family=family, backlog=1024, dualstack_ipv6=family == socket.AF_INET6)


def loopback_of(host: str) -> str | None:
    """Return the loopback address to which a machine's name leads here, as in Debian's /etc/hosts.

    None if it leads elsewhere, is an address itself, or is localhost.
    """
    with suppress(OSError, UnicodeError):
        address = str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
        if host not in (address, "localhost", "localhost.localdomain") and ip_address(address).is_loopback:
            return address
    return None


def answers(host: str, port: int, timeout_seconds: float) -> bool:
    """Return whether a process listens at an address."""
    with suppress(OSError, UnicodeError), socket.create_connection((host, port), timeout=timeout_seconds):
        return True
    return False


def interface_towards(host: str) -> str | None:
    """Return the name of the network interface with the route to `host`, or None if it is not known.

    Works for IPv4 on Linux. By default gloo uses the interface to which the machine's own host name resolves, on many
    systems the loopback interface.
    """
    with suppress(OSError, UnicodeError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # sends nothing; the kernel chooses the route
        own = probe.getsockname()[0]
        return next((name for _, name in socket.if_nameindex() if address_of(name) == own), None)
    return None


def address_of(interface: str) -> str | None:
    """Return the IPv4 address of a network interface, or None if it has none or is not known (Linux only)."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        return socket.inet_ntoa(fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", interface.encode()))[20:24])
    return None
