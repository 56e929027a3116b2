"""Where the agents and ranks of a job meet: on the loopback interface of one machine, or at an address of node 0."""

from __future__ import annotations

import time
from collections.abc import Callable

from torch.distributed import DistError, PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)

from lockstep.launch.job_spec import JobSpec
from lockstep.launch.network import LOOPBACK, answers, listener

_POLL_SECONDS = 0.1
_PATIENCE_SECONDS = 5.0  # then say what is being waited for


class LoopbackRendezvous(RendezvousHandler):
    """A rendezvous of one node, whose store listens on the loopback interface.

    torch's own rendezvous (static, c10d) make stores that listen on all addresses, whatever address they are given
    (2.13). Each attempt gets a store of its own, so that ranks which are started again do not meet what their
    predecessors left; bare torch scripts recover as well.

    Attributes:
        port: where the store of the present attempt listens.
    """

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._store: TCPStore | None = None
        self.port = 0

    def next_rendezvous(self) -> RendezvousInfo:
        """Open a new store; nobody has to be waited for."""
        sock = listener(LOOPBACK, 0)
        self.port = sock.getsockname()[1]
        self._store = TCPStore(
            LOOPBACK, self.port, is_master=True, wait_for_workers=False, master_listen_fd=sock.detach()
        )
        # A prefix for the agent's own keys keeps them apart from the ranks'.
        agents = PrefixStore("agent", self._store)
        return RendezvousInfo(agents, 0, 1, RendezvousStoreInfo(LOOPBACK, self.port))

    @property
    def use_agent_store(self) -> bool:
        """Ranks join the agent's store as clients, instead of opening one that listens everywhere."""
        return True

    def get_backend(self) -> str:
        """Return the name of this kind of rendezvous."""
        return "lockstep-loopback"

    def get_run_id(self) -> str:
        """Return an identifier of this job."""
        return self._run_id

    def num_nodes_waiting(self) -> int:
        """Return 0: there is no other node."""
        return 0

    def is_closed(self) -> bool:
        """Return whether the job is over."""
        return self._store is None

    def set_closed(self) -> None:
        """End the job."""
        self._store = None

    def shutdown(self) -> bool:
        """Close the store."""
        self._store = None
        return True


class NodesRendezvous(RendezvousHandler):
    """A rendezvous of a known number of nodes, each of which knows its rank.

    Node 0 owns the store; the nodes may start in any order. Against torch's static rendezvous it waits in small
    steps, so that Ctrl-C ends it; it names the nodes that are missing; a node whose ranks fail makes all nodes start
    theirs again, so that attempts count alike everywhere; and a node that gives up ends the job on all of them.

    Args:
        job: its nodes, several.
        timeout_seconds: how long to wait for all nodes.
        say: prints what is being waited for.
    """

    def __init__(self, job: JobSpec, timeout_seconds: float, say: Callable[[str], None]) -> None:
        self._job = job
        self._host, self._port = job.endpoint()
        self._timeout_seconds = timeout_seconds
        self._say = say
        self._store: TCPStore | None = None
        self._ranks_store: TCPStore | None = None
        self.attempt = -1

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait until all nodes have begun the next attempt."""
        self.attempt += 1
        deadline = time.monotonic() + self._timeout_seconds
        try:
            if self._store is None:
                self._store = self._open(deadline)
            attempt = PrefixStore(f"attempt_{self.attempt}", self._store)
            self._claim(attempt)
            self._await_all(attempt, deadline)
            port = self._open_for_ranks(attempt, deadline)
        except DistError as error:
            raise RendezvousClosedError(f"node 0 at {self._job.rdzv} is gone: {error}") from error
        return RendezvousInfo(attempt, self._job.node_rank, self._job.nnodes, RendezvousStoreInfo(self._host, port))

    def num_nodes_waiting(self) -> int:
        """Return whether another node wants all ranks started again; the agent then does so here."""
        if self._store is None:
            return 0
        try:
            if self._store.check(["closed"]):
                return 1
            if not PrefixStore(f"attempt_{self.attempt + 1}", self._store).check(["begun"]):
                return 0
        except DistError:  # node 0 is gone: the next rendezvous says so
            return 1
        self._say("a rank failed on another node: starting all ranks again")
        return 1

    def await_others(self) -> None:
        """Return when the other nodes are done too; only node 0, which owns the store, has to wait for that."""
        if self._store is None:
            return
        try:
            self._store.set(f"done_{self._job.node_rank}", "")
            if self._job.node_rank == 0:
                done = [f"done_{node}" for node in range(self._job.nnodes)]
                while not self._store.check(done) and not self._store.check(["closed"]):
                    time.sleep(_POLL_SECONDS)
        except DistError:
            return

    def give_up(self) -> int | None:
        """Tell all nodes that this one has failed for good; return the node that had done so before, if any."""
        own = str(self._job.node_rank)
        if self._store is None:
            return None
        try:
            first = self._store.compare_set("closed", "", own).decode()
        except DistError:
            return 0
        return None if first == own else int(first)

    def _open(self, deadline: float) -> TCPStore:
        """Open the store in which the agents meet."""
        if self._job.node_rank == 0:
            try:
                return self._serve(self._port)
            except OSError as error:
                raise RendezvousConnectionError(
                    f"node 0 cannot listen at {self._job.rdzv}: {error}; choose an address of this machine "
                    "and a free port"
                ) from error
        wait = _Wait(deadline, self._say, lambda: f"node 0 at {self._job.rdzv}")
        while not answers(self._host, self._port, timeout_seconds=1.0):
            wait.a_little()
        return TCPStore(self._host, self._port, is_master=False, wait_for_workers=False)

    def _open_for_ranks(self, attempt: PrefixStore, deadline: float) -> int:
        """Open, on node 0, a new store for the ranks, who must not meet what their predecessors left."""
        if self._job.node_rank == 0:
            self._ranks_store = self._serve(0)
            attempt.set("port", str(self._ranks_store.port))
        wait = _Wait(deadline, self._say, lambda: "node 0")
        while not attempt.check(["port"]):
            self._refuse_without([0])
            wait.a_little()
        return int(attempt.get("port"))

    def _serve(self, port: int) -> TCPStore:
        sock = listener(self._host, port)
        port = sock.getsockname()[1]
        return TCPStore(self._host, port, is_master=True, wait_for_workers=False, master_listen_fd=sock.detach())

    def _claim(self, store: PrefixStore) -> None:
        """Register this node in the attempt."""
        rank, nnodes = self._job.node_rank, self._job.nnodes
        agreed = int(store.compare_set("nnodes", "", str(nnodes)))
        if agreed != nnodes:
            raise RendezvousError(
                f"`nnodes` must be the same on all nodes, but is {nnodes} here and {agreed} elsewhere"
            )
        if store.add(f"claims_{rank}", 1) > 1:
            raise RendezvousError(f"`node_rank` must be different on each node, but is {rank} on two of them")
        store.set(f"node_{rank}", "")
        store.set("begun", "")

    def _await_all(self, attempt: PrefixStore, deadline: float) -> None:
        def missing() -> list[int]:
            return [node for node in range(self._job.nnodes) if not attempt.check([f"node_{node}"])]

        wait = _Wait(deadline, self._say, lambda: f"node {', '.join(map(str, missing()))}")
        while left := missing():
            self._refuse_without(left)
            wait.a_little()

    def _refuse_without(self, missing: list[int]) -> None:
        """Raise where waiting for these nodes is in vain."""
        assert self._store is not None
        if self._store.check(["closed"]):
            first = self._store.get("closed").decode()
            raise RendezvousClosedError(f"node {first} has failed; what went wrong is written there")
        for node in missing:
            if self._store.check([f"done_{node}"]):
                raise RendezvousClosedError(f"node {node} has finished already and cannot start again")

    @property
    def use_agent_store(self) -> bool:
        """Ranks join the agents' store as clients."""
        return True

    def get_backend(self) -> str:
        """Return the name of this kind of rendezvous."""
        return "lockstep-nodes"

    def get_run_id(self) -> str:
        """Return an identifier of this job: the same on all nodes."""
        return f"lockstep-{self._host}-{self._port}"

    def is_closed(self) -> bool:
        """Return whether the job is over."""
        return self._store is None

    def set_closed(self) -> None:
        """End the job."""
        self.give_up()

    def shutdown(self) -> bool:
        """Leave the stores; node 0 closes them."""
        self._store = self._ranks_store = None
        return True


class _Wait:
    """Waits in small steps until a deadline, and says once what for."""

    def __init__(self, deadline: float, say: Callable[[str], None], what: Callable[[], str]) -> None:
        self._deadline = deadline
        self._say = say
        self._what = what
        self._begun = time.monotonic()
        self._said = False

    def a_little(self) -> None:
        now = time.monotonic()
        if now > self._deadline:
            raise RendezvousTimeoutError(
                f"{self._what()} did not come within {self._deadline - self._begun:.0f} s; start it, and check that "
                "`rdzv` is the same on all nodes and can be reached from there"
            )
        if not self._said and now > self._begun + _PATIENCE_SECONDS:
            self._said = True
            self._say(f"waiting for {self._what()}")
        time.sleep(_POLL_SECONDS)
