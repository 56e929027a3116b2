"""The rendezvous of a job's agents and ranks: at an address of node 0, or, on one node, at the loopback address."""

from __future__ import annotations

import errno
import json
import math
import os
import socket
import stat
import sys
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import TypeVar

from torch.distributed import DistError, PrefixStore, Store, TCPStore
from torch.distributed.elastic import rendezvous

from lockstep.errors import ranks_in_words
from lockstep.launch.job import JobSpec, answers, listener, loopback_of

_T = TypeVar("_T")
_POLL_SECONDS = 0.1
_PATIENCE_SECONDS = 5.0  # then print what is missing
_SECONDS_TO_READ = 1.0
_SECONDS_OF_A_TRY = 5.0  # to connect to node 0
_STORE_TIMEOUT = timedelta(minutes=5)  # of one request; torch's own
_SECONDS_PER_BEAT = 1.0
_SECONDS_UNTIL_LOST = 10.0  # without a heartbeat
_SECONDS_UNTIL_LOST_AT_THE_END = 60.0  # when this node has nothing else to do, and to leave would end the others
_SECONDS_OF_SILENCE = 120.0  # of node 0's machine: it acknowledges nothing, as one that has lost power or its network
_SECONDS_FOR_MORE = 30.0  # at the beginning of a job, when enough nodes have come
_DISAGREES = "disagrees"  # the key of a number of nodes that is not that of the others, and who has it
_MEMBERS = "members"  # the key of an attempt that has begun: the port of its ranks' store, and the nodes' tokens


class NodeFailedError(rendezvous.RendezvousClosedError):
    """Another node has failed for good, and the job with it.

    Attributes:
        exit_code: the exit code of the rank that failed first there.
    """

    def __init__(self, node: int, exit_code: int) -> None:
        super().__init__(f"node {node} has failed; what went wrong is written there")
        self.exit_code = exit_code


class JobEndedError(rendezvous.RendezvousClosedError):
    """The job has ended well, without this node."""


class NodesRendezvous(rendezvous.RendezvousHandler):
    """A rendezvous of nodes, each of which knows its rank.

    Node 0 owns the stores, and begins each attempt; the nodes may start in any order. What torch's own rendezvous
    (c10d: `DynamicRendezvousHandler` on a `C10dRendezvousBackend`; torch 2.13) does not do:

    - Listen on one address: the store that it opens for the ranks listens on all, whatever address it is given.
    - Give each attempt a new store, so that restarted ranks of any script do not read old entries: it keeps the first.
    - Number the nodes as `--node-rank` does: it sorts them by their addresses.
    - Name the nodes that are missing, and tell nodes that disagree on their number, or have the same rank.
    - Tell a failed node from one that comes: with c10d each of them restarts all ranks. Here a node that comes waits
      until the ranks are restarted for whatever reason.
    - Say which node gave up first, and with which exit code: the job ends with it on all nodes.

    Each node but node 0 shows by a heartbeat that it is alive. Node 0 waits for those that are, at the end and at the
    beginning of an attempt, which needs MIN of them (`--nnodes MIN:MAX`), or all; whoever is not there then may take
    part in a later one.

    Args:
        job: the nodes of the job.
        say: a function that prints messages, such as which nodes are missing.
    """

    def __init__(self, job: JobSpec, say: Callable[[str], None]) -> None:
        self._job = job
        self._host, self._port = job.endpoint()
        self._run_id = uuid.uuid4().hex if job.nnodes == 1 else f"lockstep-{self._host}-{self._port}"
        self._least = job.least_nnodes or job.nnodes
        self._say = say
        self._token = uuid.uuid4().hex  # tells this launcher from one that is started again on the same node
        self._former = ""  # the token of a launcher that is gone, which was started on this node before
        self._store: TCPStore | None = None
        self._ranks_store: TCPStore | None = None
        self._heartbeats: _Heartbeats | None = None
        self._closed: tuple[int, int] | None = None  # which node has given up, and with which exit code
        self._members: Sequence[int] = range(job.nnodes)
        self._here: set[int] = set()  # on node 0: the nodes that have come to the present attempt
        self._enough_since = 0.0  # on node 0: when as many nodes had come as the job needs
        self._is_member = True
        self.attempt = -1
        self.awaited: list[int] = []  # ranks that the node which has given up only waited for
        self.silent: list[int] = []  # on node 0: those that have shown no heartbeat while `give_up` waited for others

    def next_rendezvous(self) -> rendezvous.RendezvousInfo:
        """Wait until the next attempt has begun with this node, and return where its ranks connect."""
        self.attempt += 1
        if self._closed is not None:
            raise NodeFailedError(*self._closed)
        deadline = time.monotonic() + self._job.rdzv_timeout_seconds
        try:
            if self._store is None:
                self._store = self._open(deadline)
            attempt, port = self._join(self._store, deadline)
        except DistError as error:
            raise rendezvous.RendezvousClosedError(
                f"node 0 at {self._job.rdzv} is gone: its launcher has ended, or its machine or network is lost. No "
                "other node can take its place: look there for the cause, then start the job again on all nodes (with "
                f"--resume, a training goes on from its last checkpoint). The connection says: {error}"
            ) from error
        return rendezvous.RendezvousInfo(
            attempt,
            self._members.index(self._job.node_rank),
            len(self._members),
            rendezvous.RendezvousStoreInfo(self._host, port),
        )

    def num_nodes_waiting(self) -> int:
        """Return 1 if another node wants all ranks restarted or the job is over, else 0; 1 makes the agent restart."""
        if self._store is None:
            return 0
        try:
            if self._acknowledge_closed():
                return 1
            if not PrefixStore(f"attempt_{self.attempt + 1}", self._store).check(["begun"]):
                return 0
        except DistError:  # node 0 is gone: the next rendezvous reports it
            return 1
        self._say("a rank failed on another node: starting all ranks again")
        return 1

    def await_others(self) -> None:
        """Mark this node as done; on node 0, which owns the store, wait until all are done or lost, or one gives up."""
        if self._store is None:
            return
        with suppress(DistError):
            self._store.set(f"done_{self._job.node_rank}", "")
            if self._job.node_rank == 0:
                self._wait(self._unfinished, float("inf"))
                if len(self._members) < self._job.nnodes:
                    time.sleep(_SECONDS_TO_READ)  # for a node that waits to take part

    def give_up(self, exit_code: int, seconds_for_others: float = 0.0, awaited: Sequence[int] = ()) -> tuple[int, int]:
        """Tell all nodes that this one has failed for good; return the node that did so first, and its exit code.

        Args:
            exit_code: the exit code of the rank that failed first on this node.
            seconds_for_others: how long to let another node be the first, if the ranks here only followed its failure.
                On node 0, `silent` has the nodes that show no heartbeat in 3 s or more.
            awaited: ranks of other nodes, if those here only waited for these in vain.
        """
        own, store = self._job.node_rank, self._store
        if store is None:
            return own, exit_code
        try:
            if self._job.nnodes > 1:
                looks = own == 0 and seconds_for_others >= 3 * _SECONDS_PER_BEAT  # for all: it has the store itself
                before = _Heartbeats(store).last(self._members) if looks else {}
                self._poll(self._acknowledge_closed, seconds_for_others)
                if looks and self._closed is None:
                    after = _Heartbeats(store).last(self._members)
                    self.silent = [node for node in self._members if node != own and before[node] == after[node]]
            store.compare_set("closed", "", " ".join(map(str, (own, exit_code, *awaited))))
            closed = self._acknowledge_closed()
            if self._ranks_store is not None:  # node 0, and all have come: they must still read who gave up
                done = [f"done_{node}" for node in self._members]
                self._poll(lambda: store.check(done), _PATIENCE_SECONDS)
        except DistError:
            return 0, exit_code
        assert closed is not None, "this node has closed it, if no other one has"
        return closed

    def _open(self, deadline: float) -> TCPStore:
        """Open the agents' store: node 0 serves it, and the other nodes connect to it."""
        if self._job.node_rank == 0:
            if (address := loopback_of(self._host)) is not None:
                self._say(
                    f"{self._host} is {address} on this machine, as its /etc/hosts may say, which no other machine "
                    "reaches. Give --rdzv a name or an address of node 0 in the network between the nodes"
                )
            try:
                return self._serve(self._port)
            except OSError as error:
                why = (error.strerror or str(error)).partition(" (while")[0]  # the address, which is named anyway
                remedy = "Choose an address of this machine and a free port, the same on all nodes"
                if error.errno == errno.EADDRINUSE:
                    remedy = (
                        "Another job or program has that port: choose another, the same on all nodes. Or it is node 0 "
                        "of this job: then give this node its own --node-rank"
                    )
                elif self._job.rdzv is None:
                    remedy = "Bring up the loopback interface (ip link set lo up)"
                raise rendezvous.RendezvousConnectionError(
                    f"node 0 cannot listen at {self._job.rdzv or self._host}: {why}. {remedy}"
                ) from error
        node_0 = f"node 0 at {self._job.rdzv}"

        def missing() -> str:
            if answers(self._host, self._port, timeout_seconds=1.0):
                return ""
            try:
                socket.getaddrinfo(self._host, self._port)
            except OSError:  # it may be known later, as that of a pod that starts
                return f"{node_0}, a name for which this machine finds no address"
            return node_0

        self._wait(missing, deadline)
        found: list[TCPStore] = []
        is_over = threading.Event()

        def connect() -> None:
            while not is_over.is_set() and (left := deadline - time.monotonic()) > 0:
                with suppress(DistError):
                    found.append(self._connect(timeout=timedelta(seconds=min(max(1.0, left), _SECONDS_OF_A_TRY))))
                    return
                time.sleep(_POLL_SECONDS)

        # In a thread, as torch waits in C++ for ever where another program has the port and says nothing (torch 2.13).
        thread = threading.Thread(target=connect, name="lockstep-connect", daemon=True)
        thread.start()
        other = f"{node_0} (something listens there, but does not answer as a job does: another program?)"
        try:
            self._wait(lambda: "" if found else other, deadline)
        finally:
            is_over.set()
            # One that comes back from C++ when Python has ended aborts the process. torch pauses longer between its own
            # tries than it was given (2.13).
            thread.join(3 * _SECONDS_OF_A_TRY)
        found[0].set_timeout(_STORE_TIMEOUT)
        return found[0]

    def _serve(self, port: int) -> TCPStore:
        sock = listener(self._host, port)
        port = sock.getsockname()[1]
        try:  # where this machine does not reach its own address, torch would try for five minutes, deaf to signals
            _require_reached(sock, self._host, port)
        except OSError:
            sock.close()
            raise
        return TCPStore(self._host, port, is_master=True, wait_for_workers=False, master_listen_fd=sock.detach())

    def _connect(self, timeout: timedelta = _STORE_TIMEOUT) -> TCPStore:
        store = TCPStore(self._host, self._port, is_master=False, wait_for_workers=False, timeout=timeout)
        _limit_silence(self._port)
        return store

    def _join(self, store: TCPStore, deadline: float) -> tuple[PrefixStore, int]:
        """Begin the next attempt in which this node takes part; return its store, and the port of its ranks' store."""
        self._agree_on_number(store)
        node = self._job.node_rank
        if self._heartbeats is None:
            self._heartbeats = _Heartbeats(store)
            self._former = self._heartbeats.former(node)
        is_late = False
        while True:
            attempt = PrefixStore(f"attempt_{self.attempt}", store)
            claimed = attempt.compare_set(f"node_{node}", "", self._token).decode()
            if not attempt.check([_MEMBERS]):
                if claimed == self._former:
                    claimed = attempt.compare_set(f"node_{node}", claimed, self._token).decode()
                if claimed != self._token:
                    raise rendezvous.RendezvousError(
                        f"{_same_rank(node)}, or this node's command was started again. Then start it once more"
                    )
                if node != 0:  # only now, as node 0 takes a node for there that has come and is alive
                    self._heartbeats.begin(node, self._token, self._connect)
            if self._is_member:
                attempt.set("begun", "")
            if is_late and not attempt.check([_MEMBERS]):
                self._say("the job goes on without this node until its ranks start again")
                deadline = float("inf")
            self._await_beginning(attempt, deadline, is_late)
            port, tokens = json.loads(attempt.get(_MEMBERS))
            self._is_member = tokens.get(str(node)) == self._token
            if self._is_member:
                self._members = [int(member) for member in tokens]
                return attempt, port
            is_late = True
            self.attempt += 1

    def _agree_on_number(self, store: Store) -> None:
        least, most = self._job.least_nnodes, self._job.nnodes
        own = str(most) if least is None else f"{least}:{most}"
        agreed = store.compare_set("nnodes", "", own).decode()
        if agreed != own:
            store.set(_DISAGREES, f"{own} on node {self._job.node_rank}")
            raise rendezvous.RendezvousError(
                f"`--nnodes` must be the same on all nodes, but is {own} here and {agreed} elsewhere"
            )

    def _refuse_number(self, store: Store) -> None:
        """Raise an error that says which other number of nodes a node was given."""
        other, own = store.get(_DISAGREES).decode(), store.get("nnodes").decode()
        if self._job.node_rank == 0:
            time.sleep(_SECONDS_TO_READ)  # the store ends with this node, and others that wait must read it
        raise rendezvous.RendezvousError(
            f"`--nnodes` must be the same on all nodes, but is {own} here and {other}. Start all nodes again"
        )

    def _await_beginning(self, attempt: PrefixStore, deadline: float, is_late: bool) -> None:
        """Wait until an attempt has begun; on node 0, begin it when the nodes that it awaits are there."""
        store = self._store
        assert store is not None

        self._enough_since = time.monotonic()
        is_node_0 = self._job.node_rank == 0
        if not is_node_0 and self.attempt == 0 and self._least < self._job.nnodes:
            deadline += _SECONDS_FOR_MORE  # in which node 0 may still await others

        def missing() -> list[int]:
            nodes = self._awaited(attempt, deadline)
            if nodes and self.attempt == 0 and store.check([_DISAGREES]):  # later, it is a stranger to a job that runs
                self._refuse_number(store)
            if nodes and (closed := self._acknowledge_closed()):
                raise NodeFailedError(*closed)
            ended = [node for node in nodes if store.check([f"done_{node}"])]
            if ended and is_late:
                raise JobEndedError("the job has ended without this node")
            if ended and not (is_node_0 and self._job.nnodes - len(ended) >= self._least):
                raise rendezvous.RendezvousClosedError(f"node {ended[0]} has finished already and cannot start again")
            return nodes

        def in_words(nodes: list[int]) -> str:
            return ranks_in_words(nodes if is_node_0 else self._absent(attempt) or [0], "node")

        self._wait(missing, deadline, in_words)
        if is_node_0:
            self._begin(attempt)

    def _awaited(self, attempt: PrefixStore, deadline: float) -> list[int]:
        """Return the nodes that this one awaits in an attempt, until `deadline` at most: node 0 awaits the others.

        All nodes ask node 0's store every `_POLL_SECONDS`, so that none but node 0 asks it for each of them.
        """
        if self._job.node_rank != 0:
            return [] if attempt.check([_MEMBERS]) else [0]
        assert self._heartbeats is not None
        nodes = range(self._job.nnodes)
        alive = self._heartbeats.alive(nodes, _SECONDS_UNTIL_LOST)
        self._here = here = alive - set(self._absent(attempt))
        if len(here) < self._least:
            self._enough_since = time.monotonic()
        more_until = min(self._enough_since + _SECONDS_FOR_MORE, deadline - 2 * _POLL_SECONDS)
        if len(here) < self._least or (self.attempt == 0 and time.monotonic() < more_until):
            return [node for node in nodes if node not in here]
        return sorted(alive - here)

    def _absent(self, attempt: PrefixStore) -> list[int]:
        """Return the nodes that have not come to an attempt."""
        keys = [f"node_{node}" for node in range(self._job.nnodes)]
        return [] if attempt.check(keys) else [node for node, key in enumerate(keys) if not attempt.check([key])]

    def _begin(self, attempt: PrefixStore) -> None:
        """On node 0: begin an attempt, with a new store for the ranks, and say which nodes take part."""
        # Those that were there when the wait for them ended; a second look at the heartbeats might find fewer.
        here = sorted(self._here)
        self._ranks_store = self._serve(0)
        tokens = {node: attempt.get(f"node_{node}").decode() for node in here}
        attempt.set(_MEMBERS, json.dumps((self._ranks_store.port, tokens)))
        if set(here) != set(self._members):
            self._say(f"{len(here)} of at most {self._job.nnodes} nodes take part: {ranks_in_words(here, 'node')}")

    def _acknowledge_closed(self) -> tuple[int, int] | None:
        """Return which node has given up, if any, and its exit code; let node 0 know that it may leave."""
        assert self._store is not None
        if not self._store.check(["closed"]):
            return None
        node, code, *self.awaited = map(int, self._store.get("closed").decode().split())
        self._closed = node, code
        self._store.set(f"done_{self._job.node_rank}", "")
        return self._closed

    def _unfinished(self) -> str:
        """Return in words which nodes are alive and have not ended; "" if there are none, or one has given up."""
        assert self._store is not None
        assert self._heartbeats is not None
        left = {node for node in self._members if not self._store.check([f"done_{node}"])}
        if not left or self._acknowledge_closed():
            return ""
        alive = left & self._heartbeats.alive(sorted(left), _SECONDS_UNTIL_LOST_AT_THE_END)
        if not alive:
            lost = ranks_in_words(sorted(left), "node")
            self._say(f"this node ends without {lost}, lost since the last collective")
            return ""
        return f"{ranks_in_words(sorted(alive), 'node')} to end"

    def _poll(self, over: Callable[[], object], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not over() and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)

    def _wait(self, missing: Callable[[], _T], deadline: float, in_words: Callable[[_T], str] = str) -> None:
        """Wait in small steps, which Ctrl-C interrupts, until nothing is missing; print now and again what is."""
        begun, due = time.monotonic(), _PATIENCE_SECONDS
        while what := missing():
            now = time.monotonic()
            if now > deadline:
                remedy = "start it, and check that `--rdzv` is the same on all nodes and can be reached from there"
                if self.attempt > 0:
                    remedy = (
                        "it was there before, so that its machine, network or launcher may be lost. Start the job "
                        "again with --nnodes MIN:MAX, which goes on without nodes that are lost"
                    )
                raise rendezvous.RendezvousTimeoutError(
                    f"{in_words(what)} did not come within {deadline - begun:.0f} s; {remedy}"
                )
            if now > begun + due:
                due *= 2
                limit = "" if math.isinf(deadline) else f" of {deadline - begun:.0f} s"
                where = f", --rdzv {self._job.rdzv}" if self._job.rdzv else ""
                self._say(f"waiting for {in_words(what)} ({now - begun:.0f} s{limit}{where})")
            time.sleep(_POLL_SECONDS)

    @property
    def use_agent_store(self) -> bool:
        """True: ranks connect as clients to a store that the agent serves."""
        return True

    def get_backend(self) -> str:
        """Return the name of this kind of rendezvous."""
        return "lockstep-nodes"

    def get_run_id(self) -> str:
        """Return an identifier of this job: the same on all nodes."""
        return self._run_id

    def is_closed(self) -> bool:
        """Return whether this node is not connected to the agents' store."""
        return self._store is None

    def set_closed(self) -> None:
        """End the job."""
        self.give_up(1)

    def shutdown(self) -> bool:
        """Leave the stores; node 0 closes them."""
        if self._heartbeats is not None:
            self._heartbeats.end()
        self._store = self._ranks_store = self._heartbeats = None
        return True


class _Heartbeats:
    """Which nodes are alive: each one but node 0, which owns the store, writes into it every second.

    Args:
        store: the agents' store.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._beats: dict[int, tuple[str, float]] = {}  # the last heartbeat of a node, and when it came
        self._thread: threading.Thread | None = None
        self._is_ended = threading.Event()

    def former(self, node: int) -> str:
        """Return the token of a launcher that was started as `node` before, and is gone; "" if there was none.

        Raises:
            RendezvousError: it is alive: another node has the same rank.
        """
        if before := self._read(node):
            time.sleep(3 * _SECONDS_PER_BEAT)
            if self._read(node) != before:
                raise rendezvous.RendezvousError(_same_rank(node))
        return before.partition(" ")[0]

    def begin(self, node: int, token: str, connect: Callable[[], Store]) -> None:
        """Begin to write as `node`, over a connection to the store for this alone, unless that has begun."""
        if self._thread is not None:
            return
        connection = connect()

        def beat() -> None:
            count = 0
            with suppress(Exception):  # node 0 is gone, which the main thread notices, too
                while not self._is_ended.wait(_SECONDS_PER_BEAT):
                    count += 1
                    connection.set(f"beat_{node}", f"{token} {count}")

        connection.set(f"beat_{node}", f"{token} 0")
        self._thread = threading.Thread(target=beat, name="lockstep-heartbeat", daemon=True)
        self._thread.start()

    def alive(self, nodes: Sequence[int], patience_seconds: float) -> set[int]:
        """Return node 0, and the nodes of which a new heartbeat has come lately."""
        found, now = {0}, time.monotonic()
        for node in nodes:
            if beat := self._read(node):
                before, when = self._beats.get(node, ("", now))
                self._beats[node] = beat, when if beat == before else now
                if now < self._beats[node][1] + patience_seconds:
                    found.add(node)
        return found

    def last(self, nodes: Sequence[int]) -> dict[int, str]:
        """Return the last heartbeat of each node."""
        return {node: self._read(node) for node in nodes}

    def end(self) -> None:
        """Write no longer."""
        self._is_ended.set()
        if self._thread is not None:  # a request to a store that outlives the interpreter aborts the process
            self._thread.join(2 * _SECONDS_PER_BEAT)

    def _read(self, node: int) -> str:
        key = f"beat_{node}"
        return self._store.get(key).decode() if self._store.check([key]) else ""


def _require_reached(server: socket.socket, host: str, port: int) -> None:
    """Raise an `OSError` unless a connection to an address, with what it sends, arrives at a socket of this process.

    The address may be another machine's, where another program listens. Other nodes may connect here meanwhile.
    """
    deadline = time.monotonic() + _PATIENCE_SECONDS
    with socket.create_connection((host, port), timeout=_PATIENCE_SECONDS) as connection:
        connection.sendall(token := uuid.uuid4().bytes)
        while (left := deadline - time.monotonic()) > 0:
            server.settimeout(left)
            with suppress(OSError), server.accept()[0] as arrived:
                arrived.settimeout(_POLL_SECONDS)
                if arrived.recv(len(token)) == token:
                    server.settimeout(None)
                    return
    raise OSError(
        errno.EADDRNOTAVAIL, "what connects there does not arrive here, so that it is another machine's address"
    )


def _limit_silence(port: int) -> None:
    """Let this process's connections to a port fail when the machine there has acknowledged nothing for a while.

    Torch waits for an answer, deaf to signals, as long as the kernel keeps the connection: 15 minutes (torch 2.13).
    """
    if sys.platform != "linux":
        return
    for number in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):
            if not stat.S_ISSOCK(os.fstat(number).st_mode):
                continue  # of other files `fromfd` would leave its copy open (Python 3.11)
            with socket.fromfd(number, socket.AF_INET, socket.SOCK_STREAM) as connection:
                if connection.getpeername()[1:2] == (port,):
                    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * _SECONDS_OF_SILENCE))


def _same_rank(node: int) -> str:
    return f"`--node-rank` must be different on each node, but is {node} on two of them"
