"""The rendezvous of a job's agents and ranks: at an address of node 0, or, on one node, at the loopback address."""

from __future__ import annotations

import errno
import socket
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from torch.distributed import DistError, PrefixStore, Store, TCPStore
from torch.distributed.elastic import rendezvous

from lockstep.launch.job_spec import JobSpec
from lockstep.launch.membership import Membership
from lockstep.launch.network import answers, listener

_POLL_SECONDS = 0.1
_PATIENCE_SECONDS = 5.0  # then print what is missing
_SECONDS_TO_READ = 1.0


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
    """A rendezvous of a known number of nodes, each of which knows its rank.

    Node 0 owns the stores; the nodes may start in any order. The stores listen on one address; those of torch's own
    rendezvous (static, c10d) listen on all addresses, whatever address they are given (torch 2.13). Each attempt gets a
    new store for the ranks, so that restarted ranks do not read old entries; plain torch scripts recover, too.

    Unlike torch's static rendezvous, it waits in small steps, so that Ctrl-C interrupts it, and it names the missing
    nodes. If ranks fail on one node, all nodes restart their ranks, so that all count the same attempts. If a node
    gives up, the job ends on all nodes. If nodes may be lost, `Membership` says which take part in an attempt.

    Args:
        job: the nodes of the job.
        timeout_seconds: how long to wait for all nodes.
        say: a function that prints messages, such as which nodes are missing.
    """

    def __init__(self, job: JobSpec, timeout_seconds: float, say: Callable[[str], None]) -> None:
        self._job = job
        self._host, self._port = job.endpoint()
        self._run_id = uuid.uuid4().hex if job.nnodes == 1 else f"lockstep-{self._host}-{self._port}"
        self._timeout_seconds = timeout_seconds
        self._say = say
        self._store: TCPStore | None = None
        self._ranks_store: TCPStore | None = None
        self._closed: tuple[int, int] | None = None
        self._membership: Membership | None = None
        self._members: Sequence[int] = range(job.nnodes)
        self.attempt = -1

    def next_rendezvous(self) -> rendezvous.RendezvousInfo:
        """Wait until all nodes have begun the next attempt, and return where its ranks connect."""
        self.attempt += 1
        if self._closed is not None:
            raise NodeFailedError(*self._closed)
        deadline = time.monotonic() + self._timeout_seconds
        try:
            if self._store is None:
                self._store = self._open(deadline)
            attempt = self._join_any(deadline) if self._job.least_nnodes is not None else self._join_all(deadline)
            port = self._open_for_ranks(attempt, deadline)
        except DistError as error:
            raise rendezvous.RendezvousClosedError(f"node 0 at {self._job.rdzv} is gone: {error}") from error
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
            if self._read_closed():
                return 1
            if not PrefixStore(f"attempt_{self.attempt + 1}", self._store).check(["begun"]):
                return 0
        except DistError:  # node 0 is gone: the next rendezvous reports it
            return 1
        self._say("a rank failed on another node: starting all ranks again")
        return 1

    def await_others(self) -> None:
        """Mark this node as done; on node 0, which owns the store, wait until all are done or one gives up."""
        if self._store is None:
            return
        with suppress(DistError):
            self._store.set(f"done_{self._job.node_rank}", "")
            if self._job.node_rank == 0:
                self._poll(lambda: self._all_done() or self._read_closed(), float("inf"))
                if len(self._members) < self._job.nnodes:
                    time.sleep(_SECONDS_TO_READ)  # for a node that waits to take part

    def give_up(self, exit_code: int, seconds_for_others: float = 0.0) -> tuple[int, int]:
        """Tell all nodes that this one has failed for good; return the node that did so first, and its exit code.

        Args:
            exit_code: the exit code of the rank that failed first on this node.
            seconds_for_others: how long to let another node be the first, if the ranks here only followed its failure.
        """
        own = self._job.node_rank
        if self._store is None:
            return own, exit_code
        try:
            if self._job.nnodes > 1:
                self._poll(self._read_closed, seconds_for_others)
            self._store.compare_set("closed", "", f"{own} {exit_code}")
            closed = self._read_closed()
            if self._ranks_store is not None:  # node 0, and all have come: they must still read who gave up
                self._poll(self._all_done, _PATIENCE_SECONDS)
        except DistError:
            return 0, exit_code
        assert closed is not None, "this node has closed it, if no other one has"
        return closed

    def _open(self, deadline: float) -> TCPStore:
        """Open the agents' store: node 0 serves it, and the other nodes connect to it."""
        if self._job.node_rank == 0:
            try:
                return self._serve(self._port)
            except OSError as error:
                why = (error.strerror or str(error)).partition(" (while")[0]
                remedy = "Choose an address of this machine and a free port, the same on all nodes"
                if error.errno == errno.EADDRINUSE:
                    remedy = "Another job or program has that port: choose another, the same on all nodes"
                elif self._job.rdzv is None:
                    remedy = "Bring up the loopback interface (ip link set lo up)"
                raise rendezvous.RendezvousConnectionError(
                    f"node 0 cannot listen at {self._job.rdzv or self._host}: {why}. {remedy}"
                ) from error
        node_0 = f"node 0 at {self._job.rdzv}"
        self._wait(lambda: "" if answers(self._host, self._port, timeout_seconds=1.0) else node_0, deadline)
        return self._connect()

    def _connect(self) -> TCPStore:
        return TCPStore(self._host, self._port, is_master=False, wait_for_workers=False)

    def _join_all(self, deadline: float) -> PrefixStore:
        """Begin the next attempt with all nodes."""
        assert self._store is not None
        attempt = PrefixStore(f"attempt_{self.attempt}", self._store)
        self._claim(attempt)
        self._await(attempt, {node: f"node_{node}" for node in range(self._job.nnodes)}, deadline)
        return attempt

    def _join_any(self, deadline: float) -> PrefixStore:
        """Begin the next attempt in which this node takes part, with the nodes that are there."""
        assert self._store is not None
        self._agree_on_number(self._store)
        if self._membership is None:
            self._membership = Membership(self._job, self._store, self._connect)
        is_late = False
        while True:
            attempt = PrefixStore(f"attempt_{self.attempt}", self._store)
            self._membership.claim(attempt)
            if self._job.node_rank == 0:
                self._decide(attempt, deadline)
            elif is_late and not attempt.check(["members"]):
                self._say("the job goes on without this node until its ranks start again")
                self._await_restart(attempt)
            else:
                self._await(attempt, {0: "members"}, deadline)
            if members := self._membership.of(attempt):
                self._members = members
                return attempt
            is_late = True
            self.attempt += 1

    def _decide(self, attempt: PrefixStore, deadline: float) -> None:
        """On node 0: wait for the nodes that are alive, and begin with them."""
        assert self._membership is not None
        before, begun = self._members, time.monotonic()
        membership, is_first = self._membership, self.attempt == 0

        def missing() -> str:
            if closed := self._read_closed():
                raise NodeFailedError(*closed)
            return membership.missing(attempt, begun, is_first=is_first)

        self._wait(missing, deadline)
        now = membership.of(attempt)
        if set(now) != set(before):
            nodes = ", ".join(map(str, now))
            self._say(f"{len(now)} of at most {self._job.nnodes} nodes take part: node {nodes}")

    def _await_restart(self, attempt: PrefixStore) -> None:
        """Wait until the ranks of the job are restarted, however long that takes.

        Raises:
            JobEndedError: the job has ended before.
        """
        try:
            self._await(attempt, {0: "members"}, float("inf"))
        except NodeFailedError:
            raise
        except rendezvous.RendezvousClosedError as error:
            raise JobEndedError("the job has ended without this node") from error

    def _open_for_ranks(self, attempt: PrefixStore, deadline: float) -> int:
        """Open a new store for the ranks on node 0, and return its port; ranks must not read old entries."""
        if self._job.node_rank == 0:
            self._ranks_store = self._serve(0)
            attempt.set("port", str(self._ranks_store.port))
        self._await(attempt, {0: "port"}, deadline)
        return int(attempt.get("port"))

    def _serve(self, port: int) -> TCPStore:
        sock = listener(self._host, port)
        port = sock.getsockname()[1]
        try:  # where this machine does not reach its own address, torch would try for five minutes
            socket.create_connection((self._host, port), timeout=_PATIENCE_SECONDS).close()
        except OSError:
            sock.close()
            raise
        return TCPStore(self._host, port, is_master=True, wait_for_workers=False, master_listen_fd=sock.detach())

    def _claim(self, store: PrefixStore) -> None:
        """Register this node in the attempt."""
        rank = self._job.node_rank
        self._agree_on_number(store)
        if store.add(f"claims_{rank}", 1) > 1:
            raise rendezvous.RendezvousError(
                f"`--node-rank` must be different on each node, but is {rank} on two of them"
            )
        store.set(f"node_{rank}", "")
        store.set("begun", "")

    def _agree_on_number(self, store: Store) -> None:
        least, most = self._job.least_nnodes, self._job.nnodes
        own = str(most) if least is None else f"{least}:{most}"
        agreed = store.compare_set("nnodes", "", own).decode()
        if agreed != own:
            raise rendezvous.RendezvousError(
                f"`--nnodes` must be the same on all nodes, but is {own} here and {agreed} elsewhere"
            )

    def _await(self, attempt: PrefixStore, keys: Mapping[int, str], deadline: float) -> None:
        """Wait until each of these nodes has set its key."""
        store = self._store
        assert store is not None

        def missing() -> str:
            nodes = [node for node, key in keys.items() if not attempt.check([key])]
            if nodes and (closed := self._read_closed()):
                raise NodeFailedError(*closed)
            for node in nodes:
                if store.check([f"done_{node}"]):
                    raise rendezvous.RendezvousClosedError(f"node {node} has finished already and cannot start again")
            return f"node {', '.join(map(str, nodes))}" if nodes else ""

        self._wait(missing, deadline)

    def _read_closed(self) -> tuple[int, int] | None:
        """Return which node has given up, if any, and its exit code; let node 0 know that it may leave."""
        assert self._store is not None
        if not self._store.check(["closed"]):
            return None
        node, code = self._store.get("closed").decode().split()
        self._closed = int(node), int(code)
        self._store.set(f"done_{self._job.node_rank}", "")
        return self._closed

    def _all_done(self) -> bool:
        assert self._store is not None
        return bool(self._store.check([f"done_{node}" for node in self._members]))

    def _poll(self, over: Callable[[], object], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not over() and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)

    def _wait(self, missing: Callable[[], str], deadline: float) -> None:
        """Wait in small steps until nothing is missing; print once what is."""
        begun, said = time.monotonic(), False
        while what := missing():
            now = time.monotonic()
            if now > deadline:
                raise rendezvous.RendezvousTimeoutError(
                    f"{what} did not come within {deadline - begun:.0f} s; start it, and check that `rdzv` is the same "
                    "on all nodes and can be reached from there"
                )
            if not said and now > begun + _PATIENCE_SECONDS:
                said = True
                self._say(f"waiting for {what}")
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
        if self._membership is not None:
            self._membership.close()
        self._store = self._ranks_store = self._membership = None
        return True
