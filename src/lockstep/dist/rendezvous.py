"""Where the ranks of a job meet: a store of torch's, at an address that all find, on one machine or on several."""

from __future__ import annotations

import logging
import os
import socket
import tempfile
import time
from contextlib import ExitStack, suppress
from datetime import timedelta
from hashlib import sha256
from pathlib import Path

from torch.distributed import DistError as TorchDistError
from torch.distributed import HashStore, PrefixStore, Store, TCPStore

from lockstep.errors import CollectiveTimeoutError, TopologyError, ranks_in_words
from lockstep.topology import Topology
from lockstep.watch.board import pauses

LOOPBACK = "127.0.0.1"
_OPEN_KEY = "open"  # rank 0 sets this key in the store that it serves for a group
_LONGEST_PAUSE = 0.5  # between two looks for other ranks
_SECONDS_TO_SAY = 5.0  # after which a rank says for whom it waits, then at doubling intervals
_FEW_RANKS = 8  # of more, one for each node says it

_logger = logging.getLogger("lockstep.dist")


def is_one_node(topology: Topology) -> bool:
    """Return whether all ranks are known to share one machine."""
    return topology.num_nodes == 1 and topology.local_size == topology.world_size


def meet(
    topology: Topology, store: Store | None, port: int | None, timeout: timedelta, generation: int, undo: ExitStack
) -> Store:
    """Return a connected store that all ranks of the job share.

    Args:
        topology: rank and place of this process.
        store: a store at which the ranks meet, in place of an address and port.
        port: port on rank 0, in place of the environment's.
        timeout: how long to wait for the others; also the store's own timeout.
        generation: number of groups that this process has joined before.
        undo: collects what must be removed at the end.

    **Raises**: TopologyError if no address is known or the port is taken; if rank 0 is not found in time,
    CollectiveTimeoutError if it had to publish its port, else torch's DistError.
    """
    # Separates the keys of a group from those of former groups in a store that outlives them. A launcher that restarts
    # a job may use the same store again (without this, 5 of 6 restarts over gloo hang or fail, torch 2.13), and so may
    # a process that leaves a group and joins another.
    prefix = f"lockstep/attempt_{topology.restart_count}/group_{generation}"
    if store is not None:
        return PrefixStore(prefix, store)
    if topology.launcher == "none":
        return HashStore()
    port = topology.master_port if port is None else port
    host = LOOPBACK
    if topology.agent_store or not is_one_node(topology):
        host, port = _address(topology, port)
        if topology.agent_store:
            return PrefixStore(prefix, _connect(host, port, topology, timeout))
    published = port_file(topology, generation) if port is None and topology.world_size > 1 else None
    if topology.rank != 0:
        port = _await_rank_0(host, port, published, topology, timeout)
        return _connect_to_rank_0(prefix, host, port, topology, timeout)
    served = _serve(host, port or 0, topology, timeout)
    if published is not None:
        undo.callback(published.unlink, missing_ok=True)
        _publish_port(served.port, published)
    prefixed = PrefixStore(prefix, served)
    prefixed.set(_OPEN_KEY, "")
    return prefixed


def await_all(store: Store, topology: Topology, timeout: timedelta) -> None:
    """Wait until all ranks have come to the store; after 5 s, and then at doubling intervals, say who has not.

    **Cost**: three requests to the store, and some two for each second of waiting.

    Raises:
        CollectiveTimeoutError: some rank has not come in time. Rank 0 finds out which, and the others hear it.
    """
    store.set(f"came/{topology.rank}", "")
    if store.add("come", 1) == topology.world_size:
        store.set("all_came", "")
    due = _SECONDS_TO_SAY
    for passed in pauses(timeout.total_seconds(), _LONGEST_PAUSE):
        if store.check(["all_came"]):
            return
        if passed >= due:
            due *= 2
            _say(passed, _late(store, topology), topology)
    raise _nobody_there(topology, timeout, f"{_late(store, topology)} did not come")


def _late(store: Store, topology: Topology) -> str:
    """Return in words which ranks have not come to the store; only rank 0 asks for each."""
    if topology.rank == 0:
        late = [rank for rank in range(topology.world_size) if not store.check([f"came/{rank}"])]
        store.set("late", ranks_in_words(late) if late else "a rank")  # the last may just have come
    return store.get("late").decode() if store.check(["late"]) else "rank 0, or other ranks"


def _say(seconds: float, late: str, topology: Topology) -> None:
    if topology.local_rank == 0 or topology.world_size <= _FEW_RANKS:  # else one rank of each node
        known = topology.master_addr is not None and topology.master_port is not None
        where = f", at {topology.master_addr}:{topology.master_port}" if known else ""
        _logger.warning("waiting %.0f s for %s to start (%s%s)", seconds, late, _this_rank(topology), where)


def _nobody_there(topology: Topology, timeout: timedelta, what: str) -> CollectiveTimeoutError:
    return CollectiveTimeoutError(
        f"`init_dist` must meet all {topology.world_size} ranks within {timeout.total_seconds():g} s, but {what} "
        f"({_this_rank(topology)}). Did all start, with one MASTER_ADDR and MASTER_PORT?"
    )


def _this_rank(topology: Topology) -> str:
    return f"rank {topology.rank} of {topology.world_size}"


def _address(topology: Topology, port: int | None) -> tuple[str, int]:
    if topology.master_addr is None:
        raise TopologyError(
            "MASTER_ADDR must name the host of rank 0, since the ranks are on several nodes and the launcher "
            f"{topology.launcher!r} does not say it ({_this_rank(topology)}). "
            "Export MASTER_ADDR and MASTER_PORT, e.g. mpirun -x MASTER_ADDR=node0 -x MASTER_PORT=29500"
        )
    try:
        socket.getaddrinfo(topology.master_addr, None)
    except OSError as error:  # TCPStore would retry the lookup until the timeout
        raise TopologyError(
            f"MASTER_ADDR must be a host that can be found, but is {topology.master_addr!r}: {error} "
            f"({_this_rank(topology)}). Export the address of rank 0's host"
        ) from error
    if port is None:
        # The same on every node without communication, and different for two jobs that share a node.
        digest = sha256(topology.job_key.encode()).digest()
        port = 20000 + int.from_bytes(digest[:4], "big") % 10000
    return topology.master_addr, port


def _connect_to_rank_0(prefix: str, host: str, port: int, topology: Topology, timeout: timedelta) -> Store:
    """Connect to the store that rank 0 opened for this group; a former group's store may still be closing there."""
    deadline = time.monotonic() + timeout.total_seconds()
    while True:
        left = timedelta(seconds=max(deadline - time.monotonic(), 0.001))
        try:
            store = _connect(host, port, topology, left)
            prefixed = PrefixStore(prefix, store)
            prefixed.wait([_OPEN_KEY], left)
        except TorchDistError:
            if time.monotonic() >= deadline:
                raise
            time.sleep(0.02)
        else:
            store.set_timeout(timeout)
            return prefixed


def _connect(host: str, port: int, topology: Topology, timeout: timedelta) -> TCPStore:
    return TCPStore(host, port, topology.world_size, False, timeout, wait_for_workers=False)


def _serve(host: str, port: int, topology: Topology, timeout: timedelta) -> TCPStore:
    listening = None
    try:
        if is_one_node(topology):
            # TCPStore binds all addresses even for host 127.0.0.1, unless it is given a listening socket.
            with socket.create_server((host, port), backlog=1024) as server:
                port, listening = server.getsockname()[1], server.detach()
        return TCPStore(
            host, port, topology.world_size, True, timeout, wait_for_workers=False, master_listen_fd=listening
        )
    except (OSError, RuntimeError) as error:
        raise TopologyError(
            f"MASTER_PORT must be free on rank 0, but {host}:{port} can't be bound. "
            "Choose another port, or on a single node leave it out: a free one is then found"
        ) from error


def port_file(topology: Topology, generation: int) -> Path:
    """Return the file into which rank 0 writes its port, and in which the other ranks look for it.

    **Raises**: TopologyError if nothing distinguishes this job from others on the machine, or if the file's folder
    belongs to another user.
    """
    if not topology.job_key:
        raise TopologyError(
            f"MASTER_PORT must be set, since the launcher {topology.launcher!r} gives its ranks nothing by which "
            f"to find each other ({_this_rank(topology)})"
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


def _await_rank_0(host: str, port: int | None, published: Path | None, topology: Topology, timeout: timedelta) -> int:
    """Return the port on which rank 0 serves, once something listens there; after 5 s, say what this rank waits for.

    Args:
        host: of rank 0.
        port: the port, if it is known.
        published: otherwise the file into which rank 0 writes it. One that a killed job has left behind names a port on
            which nothing listens.
        topology: rank and place of this process.
        timeout: how long to wait.
    """
    due = _SECONDS_TO_SAY
    for passed in pauses(timeout.total_seconds(), _LONGEST_PAUSE):
        with suppress(OSError, ValueError):
            found = int(published.read_text()) if port is None and published is not None else port
            with socket.create_connection((host, found or 0), timeout=1):
                return found or 0
        if passed >= due:
            due *= 2
            _say(passed, "rank 0" + (f" at {host}:{port}" if port else ""), topology)
    raise _nobody_there(topology, timeout, f"rank 0 serves no store{f' at {host}:{port}' if port else ''}")
