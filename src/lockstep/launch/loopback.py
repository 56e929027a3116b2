"""The meeting point of a job on one machine: reachable from this machine alone."""

from __future__ import annotations

from torch.distributed import PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from lockstep.launch.network import LOOPBACK, listener


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
        """Return what tells this job from others."""
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
