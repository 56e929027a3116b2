"""Where the ranks of a job meet: a store of torch's, at an address that all find, on one machine or on several."""

from __future__ import annotations

import logging
import socket
from contextlib import suppress
from datetime import timedelta
from hashlib import sha256

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


def meet(topology: Topology, store: Store | None, port: int | None, timeout: timedelta, generation: int) -> Store:
    """Return a connected store that all ranks of the job share.

    Args:
        topology: rank and place of this process.
        store: a store at which the ranks meet, in place of an address and port.
        port: port on rank 0, in place of the environment's.
        timeout: how long to wait for the others; also the store's own timeout.
        generation: number of groups that this process has joined before.

    **Raises**: TopologyError if no address is known or the port is taken; CollectiveTimeoutError if rank 0 is not found
    in time.
    """
    # Separates the keys of a group from those of former groups in a store that outlives them. A launcher that restarts
    # a job may use the same store again (without this, 5 of 6 restarts over gloo hang or fail, torch 2.13), and so may
    # a process that leaves a group and joins another.
    prefix = f"lockstep/attempt_{topology.restart_count}/group_{generation}"
    if store is not None:
        return PrefixStore(prefix, store)
    if topology.launcher == "none":
        return HashStore()
    host = LOOPBACK if is_one_node(topology) and not topology.agent_store else _host_of_rank_0(topology)
    port = port or topology.master_port
    if port is None:  # another job may serve there; only this job's ranks know its key
        port, prefix = _port_of_job(topology), f"{topology.job_key}/{prefix}"
    if topology.agent_store:
        return PrefixStore(prefix, _connect(host, port, topology, timeout))
    if topology.rank != 0:
        return _find_rank_0(prefix, host, port, topology, timeout)
    prefixed = PrefixStore(prefix, _serve(host, port, topology, timeout))
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


def _host_of_rank_0(topology: Topology) -> str:
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
    return topology.master_addr


def _port_of_job(topology: Topology) -> int:
    """Return a port that is the same on every rank without communication, and different for two jobs on a node."""
    if topology.world_size == 1:
        return 0  # any free one
    if not topology.job_key and is_one_node(topology):
        raise TopologyError(
            f"MASTER_PORT must be set, since the launcher {topology.launcher!r} gives its ranks nothing by which "
            f"to find each other ({_this_rank(topology)})"
        )
    digest = sha256(topology.job_key.encode()).digest()
    return 20000 + int.from_bytes(digest[:4], "big") % 10000


def _find_rank_0(prefix: str, host: str, port: int, topology: Topology, timeout: timedelta) -> Store:
    """Connect to the store that rank 0 opened for this group; after 5 s, say what this rank waits for.

    A former group's store may still be closing there.
    """
    due = _SECONDS_TO_SAY
    for passed in pauses(timeout.total_seconds(), _LONGEST_PAUSE):
        left = timeout - timedelta(seconds=passed)
        with suppress(OSError, TorchDistError):
            socket.create_connection((host, port), timeout=1).close()  # torch would write lines where nobody listens
            store = _connect(host, port, topology, left)
            prefixed = PrefixStore(prefix, store)
            prefixed.wait([_OPEN_KEY], left)
            store.set_timeout(timeout)
            return prefixed
        if passed >= due:
            due *= 2
            _say(passed, f"rank 0 at {host}:{port}", topology)
    raise _nobody_there(topology, timeout, f"rank 0 serves no store at {host}:{port}")


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
            f"MASTER_PORT must be free on rank 0, but {host}:{port} can't be bound. Set it to another port"
        ) from error
