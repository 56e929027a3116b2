"""Where the ranks of a job first meet: torch's TCPStore, on the loopback interface where one machine holds all."""

from __future__ import annotations

import os
import socket
import sys
import tempfile
import time
from datetime import timedelta
from hashlib import sha256
from pathlib import Path

from torch.distributed import DistError as TorchDistError
from torch.distributed import PrefixStore, Store, TCPStore

from lockstep.errors import CollectiveTimeoutError, TopologyError
from lockstep.topology import Topology

LOOPBACK = "127.0.0.1"
_DEFAULT_TIMEOUT = timedelta(minutes=5)
_OPEN = "open"  # rank 0 sets this key in the store that it serves for a group


def open_store(
    topology: Topology,
    *,
    port: int | None,
    timeout: timedelta | None,
    loopback: bool,
    generation: int,
) -> Store:
    """Return a connected store that all ranks of the job share.

    Args:
        topology: who this process is.
        port: port on rank 0, in place of the environment's.
        timeout: how long to wait for the others; also the store's own timeout.
        loopback: all ranks are on this machine, so that nothing needs to listen elsewhere.
        generation: how many groups this process has joined before; every rank counts alike.

    **Raises**: TopologyError where no address is known, or the port is taken; where rank 0 is not found in time,
    CollectiveTimeoutError if it had to publish its port, else torch's DistError.
    """
    timeout = timeout or _DEFAULT_TIMEOUT
    prefix = prefix_of(topology, generation)
    if topology.agent_store:
        host, port = _address(topology, port)
        return PrefixStore(prefix, _connect(host, port, topology, timeout))
    if not loopback:
        host, port = _address(topology, port)
        if topology.rank == 0:
            return _opened(prefix, _serve_everywhere(host, port, topology, timeout))
        return _joined(prefix, host, port, topology, timeout)
    port = port if port is not None else topology.master_port
    if topology.world_size == 1:
        return PrefixStore(prefix, _serve_on_loopback(port, topology, timeout))
    meeting_point = None if port is not None else port_file(topology, generation)
    if topology.rank == 0:
        store = _serve_on_loopback(port, topology, timeout)
        if meeting_point is not None:
            _publish_port(store.port, meeting_point)
        return _opened(prefix, store)
    if meeting_point is not None:
        port = _await_published_port(meeting_point, topology, timeout)
    assert port is not None
    return _joined(prefix, LOOPBACK, port, topology, timeout)


def prefix_of(topology: Topology, generation: int) -> str:
    """Return what keeps the keys of a group apart from those of former ones in a store that outlives them.

    A launcher that restarts a job may come to the same store again (without this, 5 of 6 restarts over gloo hang or
    fail, torch 2.13), and so may a process that leaves a group and joins another.
    """
    return f"lockstep/attempt_{topology.restart_count}/group_{generation}"


def loopback_interface() -> str:
    """Return the name of the loopback interface on this system."""
    return "lo0" if sys.platform == "darwin" else "lo"


def _address(topology: Topology, port: int | None) -> tuple[str, int]:
    if topology.master_addr is None:
        raise TopologyError(
            "MASTER_ADDR must name the host of rank 0, since the ranks are on several nodes and the launcher "
            f"{topology.launcher!r} does not say it (rank {topology.rank} of {topology.world_size}). "
            "Export MASTER_ADDR and MASTER_PORT, e.g. mpirun -x MASTER_ADDR=node0 -x MASTER_PORT=29500"
        )
    try:
        socket.getaddrinfo(topology.master_addr, None)
    except OSError as error:  # TCPStore would look it up again and again until the timeout
        raise TopologyError(
            f"MASTER_ADDR must be a host that can be found, but is {topology.master_addr!r}: {error} "
            f"(rank {topology.rank} of {topology.world_size}). Export the address of rank 0's host"
        ) from error
    if port is None:
        port = topology.master_port
    if port is None:
        # The same on every node without asking anybody, and different for two jobs that share a node.
        digest = sha256(topology.job_key.encode()).digest()
        port = 20000 + int.from_bytes(digest[:4], "big") % 10000
    return topology.master_addr, port


def _opened(prefix: str, store: TCPStore) -> Store:
    opened = PrefixStore(prefix, store)
    opened.set(_OPEN, "")
    return opened


def _joined(prefix: str, host: str, port: int, topology: Topology, timeout: timedelta) -> Store:
    """Connect to the store that rank 0 has opened for this group; one of a former group may still be closing there."""
    deadline = time.monotonic() + timeout.total_seconds()
    while True:
        left = timedelta(seconds=max(deadline - time.monotonic(), 0.001))
        try:
            store = _connect(host, port, topology, left)
            joined = PrefixStore(prefix, store)
            joined.wait([_OPEN], left)
        except TorchDistError:
            if time.monotonic() >= deadline:
                raise
            time.sleep(0.02)
        else:
            store.set_timeout(timeout)
            return joined


def _connect(host: str, port: int, topology: Topology, timeout: timedelta) -> TCPStore:
    return TCPStore(host, port, topology.world_size, False, timeout, wait_for_workers=False)


def _serve_everywhere(host: str, port: int, topology: Topology, timeout: timedelta) -> TCPStore:
    try:
        return TCPStore(host, port, topology.world_size, True, timeout, wait_for_workers=False)
    except RuntimeError as error:
        raise TopologyError(_port_taken(host, port)) from error


def _serve_on_loopback(port: int | None, topology: Topology, timeout: timedelta) -> TCPStore:
    # TCPStore binds all addresses even for host 127.0.0.1, unless it is given a socket that listens already.
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((LOOPBACK, port or 0))
    except OSError as error:
        listener.close()
        raise TopologyError(_port_taken(LOOPBACK, port or 0)) from error
    listener.listen(1024)
    bound = listener.getsockname()[1]
    return TCPStore(
        LOOPBACK,
        bound,
        topology.world_size,
        True,
        timeout,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def _port_taken(host: str, port: int) -> str:
    return (
        f"MASTER_PORT must be free on rank 0, but {host}:{port} can't be bound. "
        "Choose another port, or on a single node leave it out: a free one is then found"
    )


def port_file(topology: Topology, generation: int) -> Path:
    """Return where rank 0 writes the port it found, and the others look for it.

    **Raises**: TopologyError where nothing tells this job from others on the machine.
    """
    if not topology.job_key:
        raise TopologyError(
            f"MASTER_PORT must be set, since the launcher {topology.launcher!r} gives its ranks nothing by which "
            f"to find each other (rank {topology.rank} of {topology.world_size})"
        )
    folder = Path(tempfile.gettempdir()) / f"lockstep-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise TopologyError(
            f"{folder} must belong to the user of this process, but does not. Set MASTER_PORT, or TMPDIR"
        )
    return folder / f"{topology.job_key}.{topology.restart_count}.{generation}.port"


def _publish_port(port: int, path: Path) -> None:
    draft = path.with_suffix(f".{os.getpid()}")
    draft.write_text(str(port))
    draft.rename(path)


def _await_published_port(path: Path, topology: Topology, timeout: timedelta) -> int:
    deadline = time.monotonic() + timeout.total_seconds()
    while time.monotonic() < deadline:
        # A file that a killed job left behind names a port where nobody listens: look again until somebody does.
        try:
            port = int(path.read_text())
            with socket.create_connection((LOOPBACK, port), timeout=1):
                return port
        except (OSError, ValueError):
            time.sleep(0.02)
    raise CollectiveTimeoutError(
        f"rank 0 must publish its port within {timeout.total_seconds():g} s, but did not "
        f"(rank {topology.rank} of {topology.world_size}). Did it start?"
    )
