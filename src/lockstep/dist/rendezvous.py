"""Where the ranks of a job meet: a store of torch's, at an address that all find, on one machine or on several."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from contextlib import suppress
from datetime import timedelta
from hashlib import sha256
from pathlib import Path

from torch.distributed import DistError as TorchDistError
from torch.distributed import HashStore, PrefixStore, Store, TCPStore

from lockstep.errors import CollectiveTimeoutError, PeerError, TopologyError, ranks_in_words
from lockstep.topology import Topology
from lockstep.topology.environ import LEFT_FILE, is_loopback
from lockstep.watch.board import pauses

LOOPBACK = "127.0.0.1"
_OPEN_KEY = "open"  # rank 0 sets this key in the store that it serves for a group
_LONGEST_PAUSE = 0.5  # between two looks for other ranks
_SECONDS_TO_SAY = 5.0  # after which a rank says for whom it waits, then at doubling intervals
_FEW_RANKS = 8  # of more, one for each node says it
_SECONDS_TO_CONNECT = 1.0
_OTHER_PROGRAM = "where another program listens, or another job. Set MASTER_PORT to a free port, the same on all ranks"

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

    **Raises**: TopologyError if no address is known, the port is taken, or rank 0 is not where its address says;
    CollectiveTimeoutError if rank 0 is not found in time.
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
        return PrefixStore(prefix, _find_store(host, port, topology, timeout))
    if topology.rank != 0:
        return _find_store(host, port, topology, timeout, prefix)
    prefixed = PrefixStore(prefix, _serve(host, port, topology, timeout))
    prefixed.set(_OPEN_KEY, "")
    return prefixed


def await_all(store: Store, topology: Topology, timeout: timedelta) -> None:
    """Wait until all ranks have come to the store; after 5 s, and then at doubling intervals, say who has not.

    A rank whose process was started again while the others wait is counted once.

    **Cost**: four requests to the store, and some two for each second of waiting.

    Raises:
        CollectiveTimeoutError: some rank has not come in time. Rank 0 finds out which, and the others hear it.
        PeerError: who serves the store has ended; or the script of a rank of this node, started by lockstep's launcher,
            has ended before the rank came.
        TopologyError: all have come, another process as this rank; or another rank has another WORLD_SIZE.
    """
    due = _SECONDS_TO_SAY
    try:
        _come(store, topology)
        for passed in pauses(timeout.total_seconds(), _LONGEST_PAUSE):
            if store.check(["all_came"]):
                return
            if (left := _left(store, topology)) is not None:
                raise PeerError(
                    f"`init_dist` must meet all {topology.world_size} ranks, but the script of rank {left} has ended, "
                    f"without an error, before it came ({_this_rank(topology)}). Does it return, or exit, too early "
                    "on that rank?",
                    rank=left,
                )
            if passed >= due:
                due *= 2
                _refuse_other_sizes(store, topology)
                _say(passed, f"{_late(store, topology)} to start", topology, f", at {_place(store, topology)}")
        _refuse_other_sizes(store, topology)
        late = _late(store, topology)
    except TorchDistError as error:
        who = "the launcher's store" if topology.agent_store else "rank 0, which serves the store at which they meet,"
        raise PeerError(
            f"`init_dist` must meet all {topology.world_size} ranks, but {who} has ended ({_this_rank(topology)}). "
            "Its output has the reason",
            rank=None if topology.agent_store else 0,
            cause=str(error),
        ) from error
    raise _nobody_there(topology, timeout, f"{late} did not come")


def _come(store: Store, topology: Topology) -> None:
    """Say in the store that this rank has come.

    Raises:
        TopologyError: another process goes on as this rank already; or ranks that came before have another WORLD_SIZE,
            which they hear of.
    """
    own = agreed = str(topology.world_size)
    if not topology.agent_store:  # an agent may start all again, in other numbers, at the same store
        agreed = store.compare_set("world_size", "", own).decode()
    if agreed != own:
        store.set("disagrees", f"{own} on rank {topology.rank}")
        raise _other_size(topology, f"{agreed} on ranks that came before")
    if store.add(f"came/{topology.rank}", 1) == 1:
        if store.add("come", 1) == topology.world_size:
            store.set("all_came", "")
    elif store.check(["all_came"]) and not topology.agent_store:
        raise TopologyError(
            f"each process must have a rank of its own, but another one has come as rank {topology.rank} of "
            f"{topology.world_size} already. Give each process its own RANK, and each job its own MASTER_PORT"
        )


def _left(store: Store, topology: Topology) -> int | None:
    """Return a rank of this node whose script has ended, as lockstep's launcher notes, and which has not come."""
    if error_file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        of_node = Path(error_file).parent.parent  # torch's agent makes a folder for each local rank
        for local in range(topology.local_size):
            rank = topology.rank - topology.local_rank + local
            if (of_node / str(local) / LEFT_FILE).exists() and not store.check([f"came/{rank}"]):
                return rank
    return None


def _refuse_other_sizes(store: Store, topology: Topology) -> None:
    if store.check(["disagrees"]):
        raise _other_size(topology, store.get("disagrees").decode())


def _other_size(topology: Topology, other: str) -> TopologyError:
    return TopologyError(
        f"WORLD_SIZE must be the same on all ranks, but is {topology.world_size} on rank {topology.rank}, and {other}. "
        "Give all ranks the number of processes of the whole job"
    )


def _late(store: Store, topology: Topology) -> str:
    """Return in words which ranks have not come to the store; only rank 0 asks for each."""
    if topology.rank == 0:
        late = [rank for rank in range(topology.world_size) if not store.check([f"came/{rank}"])]
        store.set("late", ranks_in_words(late) if late else "a rank")  # the last may just have come
    return store.get("late").decode() if store.check(["late"]) else "rank 0, or other ranks"


def _place(store: Store, topology: Topology) -> str:
    """Return where a store is, and why not at the address that the environment names."""
    below = store.underlying_store if isinstance(store, PrefixStore) else store
    if not isinstance(below, TCPStore):
        return "a store that was handed in"
    is_given = below.host == LOOPBACK and topology.master_addr is not None and not is_loopback(topology.master_addr)
    why = f", since all ranks are said to be on this machine, not at {topology.master_addr}" if is_given else ""
    return f"{_address(below.host, below.port)}{why}"


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _say(seconds: float, what: str, topology: Topology, where: str = "") -> None:
    if topology.local_rank == 0 or topology.world_size <= _FEW_RANKS:  # else one rank of each node
        _logger.warning("waiting %.0f s for %s (%s%s)", seconds, what, _this_rank(topology), where)


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
    except (OSError, UnicodeError) as error:  # TCPStore would retry the lookup until the timeout
        raise TopologyError(
            f"MASTER_ADDR must be a host that can be found, but is {topology.master_addr!r}, which this host, "
            f"{socket.gethostname()}, does not know: {getattr(error, 'strerror', error)} ({_this_rank(topology)}). "
            "Export the name or IP address of rank 0's host, the same on all ranks"
        ) from error
    return topology.master_addr


def _port_of_job(topology: Topology) -> int:
    """Return a port that is the same on every rank without communication, and different for two jobs."""
    if topology.world_size == 1:
        return 0  # any free one
    if not topology.job_key:
        raise TopologyError(
            f"MASTER_PORT must be set, since the launcher {topology.launcher!r} gives its ranks nothing by which "
            f"to find each other ({_this_rank(topology)})"
        )
    digest = sha256(topology.job_key.encode()).digest()
    return 20000 + int.from_bytes(digest[:4], "big") % 10000


def _find_store(host: str, port: int, topology: Topology, timeout: timedelta, prefix: str | None = None) -> Store:
    """Connect to the store that rank 0 opened for this group; after 5 s, say what is at its address meanwhile.

    A former group's store may still be closing there.

    Args:
        host: where the store is.
        port: the store's port.
        topology: rank and place of this process.
        timeout: how long to look for it; also the store's own timeout.
        prefix: of the keys of this group, which rank 0 opens there; None for a launcher's store, which is open.
    """
    search = _Search(host, port, topology.world_size)
    who = "the launcher's store" if prefix is None else "rank 0"
    due = _SECONDS_TO_SAY
    for passed in pauses(timeout.total_seconds(), _LONGEST_PAUSE):
        found = search.find(prefix)
        if found is not None:
            found.set_timeout(timeout)
            return found
        if passed >= due:
            due *= 2
            _say(passed, f"{who} at {_address(host, port)} to start, {search.trouble}", topology)
    serves = "no launcher serves a store" if prefix is None else "rank 0 serves no store"
    raise _nobody_there(topology, timeout, f"{serves} at {_address(host, port)}, {search.trouble}")


class _Search:
    """Looks for a store at an address, and finds out what is there in its place.

    Args:
        host: where the store should be.
        port: the store's port.
        world_size: the number of ranks of the job.
    """

    def __init__(self, host: str, port: int, world_size: int) -> None:
        self._host, self._port, self._world_size = host, port, world_size
        self._store: TCPStore | None = None
        self._attempt: threading.Thread | None = None
        self._next, self._pause = 0.0, _LONGEST_PAUSE / 8
        self.trouble = ""

    def find(self, prefix: str | None) -> Store | None:
        """Return the store if it is there; if `prefix` is given, with these keys, once it is open for them."""
        if self._attempt is None and time.monotonic() >= self._next and self._may_be_store():
            # In a thread, as torch waits in C++ for ever where another program has the port and says nothing (2.13).
            self._attempt = threading.Thread(target=self._connect, name="lockstep-connect", daemon=True)
            self._attempt.start()
        if self._attempt is None:
            return None
        self._attempt.join(_LONGEST_PAUSE)
        self.trouble = _OTHER_PROGRAM
        if self._store is not None:
            with suppress(TorchDistError):  # it may be closing
                found = self._store if prefix is None else PrefixStore(prefix, self._store)
                return found if prefix is None or found.check([_OPEN_KEY]) else None
        if not self._attempt.is_alive():
            self._attempt = self._store = None
            self._next, self._pause = time.monotonic() + self._pause, min(4 * self._pause, _SECONDS_TO_SAY)
        return None

    def _connect(self) -> None:
        wait = timedelta(seconds=_SECONDS_TO_CONNECT)
        with suppress(TorchDistError):
            self._store = TCPStore(self._host, self._port, self._world_size, False, wait, wait_for_workers=False)

    def _may_be_store(self) -> bool:
        """Return whether something listens that may be a store; where none is, torch would write many lines."""
        try:
            socket.create_connection((self._host, self._port), timeout=_SECONDS_TO_CONNECT).close()
        except ConnectionRefusedError:
            self.trouble = "where nobody listens"
        except OSError as error:
            self.trouble = (
                f"which can't be reached: {error.strerror or error}. Is it an address of rank 0's host, and does a "
                "firewall let the port through?"
            )
        else:
            return True
        return False


def _serve(host: str, port: int, topology: Topology, timeout: timedelta) -> TCPStore:
    # TCPStore binds all addresses even for host 127.0.0.1, unless it is given a listening socket.
    own = (host, port) if is_one_node(topology) else ("", port)
    is_dual = not is_one_node(topology) and socket.has_dualstack_ipv6()
    try:
        family = socket.AF_INET6 if is_dual else socket.AF_INET
        server = socket.create_server(own, family=family, dualstack_ipv6=is_dual, backlog=1024)
    except OSError as error:
        raise TopologyError(
            f"MASTER_PORT must be free on rank 0, but {_address(host, port)} can't be bound: "
            f"{os.strerror(error.errno or 0)} ({_this_rank(topology)}). Set it to another port, the same on all ranks; "
            "in a process that a rank has started, and that inherits its variables, say launcher='none'"
        ) from error
    with server:
        port = server.getsockname()[1]
        server.settimeout(_SECONDS_TO_SAY)
        try:  # torch would try until the timeout
            with socket.create_connection((host, port), timeout=_SECONDS_TO_SAY):
                server.accept()[0].close()
        except OSError as error:
            raise TopologyError(
                f"MASTER_ADDR must be an address of rank 0's host, which is this one, {socket.gethostname()}, but it "
                f"does not reach itself at {_address(host, port)}: {error.strerror or error} ({_this_rank(topology)}). "
                "Export the address of rank 0's host, the same on all ranks"
            ) from error
        server.settimeout(None)
        listening = server.detach()
    return TCPStore(host, port, topology.world_size, True, timeout, wait_for_workers=False, master_listen_fd=listening)
