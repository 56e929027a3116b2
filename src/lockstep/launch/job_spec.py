"""How many ranks on how many machines, and where those meet."""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.launch.network import LOOPBACK


@dataclass(frozen=True, slots=True)
class JobSpec:
    """How many ranks run on how many nodes, and where those meet.

    Attributes:
        nproc: ranks on this node.
        nnodes: nodes of the job.
        node_rank: which of them this one is.
        rdzv: ``"HOST:PORT"`` where the nodes meet; HOST is an address of node 0. None with one node.

    Raises:
        ValueError: a number is out of range, or `rdzv` does not fit `nnodes`.
    """

    nproc: int = 1
    nnodes: int = 1
    node_rank: int = 0
    rdzv: str | None = None

    def __post_init__(self) -> None:
        for name, count in (("nproc", self.nproc), ("nnodes", self.nnodes)):
            if count < 1:
                raise ValueError(f"`{name}` must be at least 1, but is {count}")
        if not 0 <= self.node_rank < self.nnodes:
            raise ValueError(
                f"`node_rank` must be from 0 to {self.nnodes - 1}, since `nnodes` is {self.nnodes}, "
                f"but is {self.node_rank}"
            )
        if self.nnodes == 1 and self.rdzv is not None:
            raise ValueError(
                f"`rdzv` is for several nodes, but is {self.rdzv!r} with `nnodes` 1; leave it out, or give `nnodes`"
            )
        self.endpoint()

    def endpoint(self) -> tuple[str, int]:
        """Return host and port of `rdzv`; with one node those of any free port of the loopback interface."""
        if self.nnodes == 1:
            return LOOPBACK, 0
        host, _, port = (self.rdzv or "").rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise ValueError(
                "`rdzv` must be HOST:PORT, an address of node 0 and a free port there, the same on every "
                f"node, but is {self.rdzv!r}"
            )
        return host.strip("[]"), int(port)
